"""Every variable of a deployment, declared once.

A :class:`Setting` says what a variable is called in Ansible, its type, default and meaning in three languages, and
under which names it is rendered into which files. Roles' ``argument_specs`` and ``defaults``, the environment files,
``docs/configuration.*.md`` and ``kvpersist config`` are generated from this table or tested against it. One Ansible
variable may be rendered under several names: that is how the two sides of one connection cannot disagree.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Union

from .envfile import Entry, parse, render
from .errors import UsageError

Value = Union[str, int, float, bool]

CACHE_ENV = "cache.env.local"
SERVER_ENV = "lmcache-server.env"
ENGINE_ENV = "tp4.env"
FILES = (CACHE_ENV, SERVER_ENV, ENGINE_ENV)

LANGUAGES = ("en", "ru", "zh")
# How alike a name must be to be suggested: the right name after the wrong role is just below difflib's own 0.6.
_NEAR = 0.55


@dataclass(frozen=True)
class Meaning:
    """What a setting means, one line per language."""

    en: str
    ru: str
    zh: str

    def text(self, language: str) -> str:
        """The line in ``language``, one of :data:`LANGUAGES`."""
        return {"en": self.en, "ru": self.ru, "zh": self.zh}[language]


@dataclass(frozen=True)
class Setting:
    """One variable.

    Attributes:
        variable: its name in Ansible; the part before the first known role prefix says whose it is.
        kind: ``str``, ``path`` (absolute), ``int``, ``float``, ``bool`` or ``choice``.
        default: its value when nobody sets it. An empty string means "not set" for ``str`` and ``path``.
        meaning: what it does, with units.
        renders: pairs of file and the name it has there.
        choices: the values a ``choice`` may have.
        minimum, maximum: inclusive bounds of a number.
        required: an empty value is an error.
    """

    variable: str
    kind: str
    default: Value
    meaning: Meaning
    renders: tuple[tuple[str, str], ...] = ()
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    required: bool = False

    @property
    def role(self) -> str:
        """The role whose defaults hold this variable."""
        for prefix in ("cache_server", "vllm_engine"):
            if self.variable.startswith(prefix + "_"):
                return prefix
        return "kvp_common"


def _cache(name: str) -> tuple[tuple[str, str], ...]:
    return ((CACHE_ENV, name),)


def _engine(name: str) -> tuple[tuple[str, str], ...]:
    return ((ENGINE_ENV, name),)


_PORT = {"minimum": 1, "maximum": 65535}

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "kvp_home",
        "path",
        "/opt/kvpersist",
        Meaning(
            "Folder of kvpersist's own programs on the host.",
            "Папка программ kvpersist на хосте.",
            "kvpersist 自身程序在主机上的目录。",
        ),
        _cache("KVP_HOME"),
        required=True,
    ),
    Setting(
        "kvp_config_dir",
        "path",
        "/etc/kvpersist",
        Meaning(
            "Folder of the rendered environment files.",
            "Папка, куда записываются файлы окружения.",
            "渲染后的环境文件所在目录。",
        ),
        required=True,
    ),
    Setting(
        "kvp_state_dir",
        "path",
        "/var/lib/kv-persistence",
        Meaning(
            "Folder of kvpersist's state: hash cache, recovery results.",
            "Папка состояния kvpersist: кэш хешей, результаты проверки восстановления.",
            "kvpersist 的状态目录：哈希缓存、恢复验收结果。",
        ),
        _cache("KVP_STATE_DIR"),
        required=True,
    ),
    Setting(
        "kvp_log_dir",
        "path",
        "/var/lib/kv-persistence/log",
        Meaning(
            "Folder of the logs of cache server and engine.",
            "Папка журналов сервера кэша и движка.",
            "缓存服务器与引擎的日志目录。",
        ),
        _cache("KVP_LOG_DIR"),
        required=True,
    ),
    Setting(
        "kvp_models_dir",
        "path",
        "/models",
        Meaning(
            "Folder in which the model appears as <family>/<namespace>; in launch mode host a link on the host, in "
            "launch mode docker a mount inside the container.",
            "Папка, в которой модель видна как <family>/<namespace>: ссылка на хосте в режиме host, точка монтирования "
            "в контейнере в режиме docker.",
            "模型以 <family>/<namespace> 出现的目录；host 模式下为主机上的链接，docker 模式下为容器内挂载点。",
        ),
        _cache("KVP_MODELS_DIR"),
        required=True,
    ),
    Setting(
        "kvp_launch_mode",
        "choice",
        "docker",
        Meaning(
            "How cache server and engine run: as programs of the host or as Docker containers.",
            "Как работают сервер кэша и движок: программами хоста или контейнерами Docker.",
            "缓存服务器与引擎的运行方式：主机程序或 Docker 容器。",
        ),
        _cache("KVP_LAUNCH_MODE"),
        choices=("docker", "host"),
    ),
    Setting(
        "kvp_service_manager",
        "choice",
        "auto",
        Meaning(
            "Who keeps the launchers running; auto takes systemd where it is PID 1, else supervisor.",
            "Кто держит процессы запущенными; auto выбирает systemd, если это PID 1, иначе supervisor.",
            "由谁保持进程运行；auto 在 PID 1 为 systemd 时用 systemd，否则用 supervisor。",
        ),
        _cache("KVP_SERVICE_MANAGER"),
        choices=("auto", "systemd", "supervisor"),
    ),
    Setting(
        "kvp_device",
        "choice",
        "cuda",
        Meaning(
            "What the engine computes on.",
            "На чём считает движок.",
            "引擎的计算设备。",
        ),
        _cache("KVP_DEVICE"),
        choices=("cuda", "cpu"),
    ),
    Setting(
        "kvp_model_dir",
        "path",
        "",
        Meaning(
            "Folder with config.json, weights and tokenizer of the model.",
            "Папка модели: config.json, веса, токенизатор.",
            "模型目录：config.json、权重与分词器。",
        ),
        ((CACHE_ENV, "KVP_MODEL_DIR"), (ENGINE_ENV, "MODEL_DIR")),
        required=True,
    ),
    Setting(
        "kvp_model_id",
        "str",
        "",
        Meaning(
            "The model's name, normally its Hugging Face id.",
            "Имя модели, обычно её идентификатор на Hugging Face.",
            "模型名称，通常为其 Hugging Face id。",
        ),
        _engine("MODEL_ID"),
        required=True,
    ),
    Setting(
        "kvp_model_revision",
        "str",
        "",
        Meaning(
            "The model's revision, 40 hex digits; empty takes the commit of its download, else the weights' bytes.",
            "Ревизия модели, 40 шестнадцатеричных цифр; пусто — коммит загрузки, иначе вычисляется из байтов весов.",
            "模型修订版，40 位十六进制；为空则取下载时的提交，否则由权重字节推导。",
        ),
        _engine("MODEL_REVISION"),
    ),
    Setting(
        "kvp_model_family",
        "str",
        "",
        Meaning(
            "Prefix before the namespace in the path of the model, the same for every launcher, e.g. mimo-pro.",
            "Префикс перед пространством имён в пути модели, одинаковый для всех запускающих программ, например "
            "mimo-pro.",
            "模型路径中命名空间之前的前缀，各启动器一致，例如 mimo-pro。",
        ),
        _engine("MODEL_FAMILY"),
        required=True,
    ),
    Setting(
        "kvp_cache_root",
        "path",
        "/var/lib/kv-persistence/l2",
        Meaning(
            "Folder of the disk tier (L2), on a local NVMe.",
            "Папка дискового уровня (L2) на локальном NVMe.",
            "磁盘层（L2）目录，位于本地 NVMe。",
        ),
        _cache("KVP_CACHE_ROOT"),
        required=True,
    ),
    Setting(
        "kvp_cache_budget_gb",
        "float",
        1500.0,
        Meaning(
            "Disk budget of the L2 tier in GB (10^9 bytes).",
            "Бюджет диска для уровня L2 в ГБ (10^9 байт).",
            "L2 层的磁盘预算，单位 GB（10^9 字节）。",
        ),
        _cache("KVP_CACHE_BUDGET_GB"),
        minimum=0.001,
    ),
    Setting(
        "kvp_cache_min_free_gb",
        "float",
        50.0,
        Meaning(
            "Space in GB that must stay free on the disk of the L2 tier when the budget is used up.",
            "Сколько ГБ должно остаться свободным на диске L2, когда бюджет исчерпан.",
            "L2 预算用尽时，其磁盘上仍须保留的空闲空间（GB）。",
        ),
        _cache("KVP_CACHE_MIN_FREE_GB"),
        minimum=0,
    ),
    Setting(
        "kvp_cache_device",
        "str",
        "",
        Meaning(
            "Block device behind the L2 tier, e.g. nvme0n1: its read counters become evidence in the recovery "
            "acceptance. Empty: found from the folder where that is possible.",
            "Блочное устройство уровня L2, например nvme0n1: его счётчики чтения служат доказательством при проверке "
            "восстановления. Пусто: определяется по папке, если это возможно.",
            "L2 层背后的块设备，例如 nvme0n1：其读取计数器作为恢复验收的证据。为空则尽可能由目录推断。",
        ),
        _cache("KVP_CACHE_DEVICE"),
    ),
    Setting(
        "kvp_cache_host",
        "str",
        "127.0.0.1",
        Meaning(
            "Address on which the cache server listens and to which the engine connects.",
            "Адрес, на котором слушает сервер кэша и к которому подключается движок.",
            "缓存服务器监听、引擎连接的地址。",
        ),
        ((CACHE_ENV, "KVP_LMCACHE_HOST"), (SERVER_ENV, "LMCACHE_HOST"), (ENGINE_ENV, "KV_PERSIST_HOST")),
        required=True,
    ),
    Setting(
        "kvp_cache_port",
        "int",
        5555,
        Meaning(
            "Request port of the cache server (ZMQ), for both sides.",
            "Порт запросов сервера кэша (ZMQ), для обеих сторон.",
            "缓存服务器的请求端口（ZMQ），两端共用。",
        ),
        ((CACHE_ENV, "KVP_LMCACHE_PORT"), (SERVER_ENV, "LMCACHE_PORT"), (ENGINE_ENV, "KV_PERSIST_PORT")),
        **_PORT,  # type: ignore[arg-type]  # mypy cannot match a splatted dict to the two bounds
    ),
    Setting(
        "kvp_cache_http_port",
        "int",
        8080,
        Meaning(
            "Administration and metrics port of the cache server (HTTP, loopback).",
            "Порт администрирования и метрик сервера кэша (HTTP, только loopback).",
            "缓存服务器的管理与指标端口（HTTP，仅回环）。",
        ),
        ((CACHE_ENV, "KVP_LMCACHE_HTTP_PORT"), (SERVER_ENV, "LMCACHE_HTTP_PORT")),
        **_PORT,  # type: ignore[arg-type]
    ),
    Setting(
        "kvp_chunk_size",
        "int",
        256,
        Meaning(
            "Tokens per KV chunk; a multiple of the block size.",
            "Токенов в одном фрагменте KV; кратно размеру блока.",
            "每个 KV 分块的 token 数；须为 block size 的整数倍。",
        ),
        _cache("KVP_CHUNK_SIZE"),
        minimum=1,
    ),
    Setting(
        "kvp_codec",
        "str",
        "none",
        Meaning(
            "Lossless codec of the L2 tier; part of the identity.",
            "Кодек уровня L2 без потерь; часть идентичности.",
            "L2 层的无损编解码；属于身份的一部分。",
        ),
        ((SERVER_ENV, "LMCACHE_L2_SERDE"),),
        required=True,
    ),
    Setting(
        "cache_server_l2_backend",
        "choice",
        "kvpersist",
        Meaning(
            "LMCache adapter of the L2 tier: kvpersist, this project's own, or one of LMCache's. Only kvpersist and "
            "raw_block keep the budget; docs/l2-adapter.md compares them.",
            "Адаптер LMCache для уровня L2: kvpersist, собственный адаптер проекта, или один из адаптеров LMCache. "
            "Бюджет соблюдают только kvpersist и raw_block; сравнение — в docs/l2-adapter.md.",
            "L2 层使用的 LMCache 适配器：本项目自带的 kvpersist，或 LMCache 自带的之一。"
            "只有 kvpersist 和 raw_block 遵守预算；比较见 docs/l2-adapter.md。",
        ),
        _cache("KVP_L2_BACKEND"),
        choices=("kvpersist", "fs_native", "nixl_store_dynamic", "fs", "raw_block"),
    ),
    Setting(
        "cache_server_l1_size_gb",
        "float",
        64.0,
        Meaning(
            "Host memory of the L1 tier in GB; a whole prefix must fit.",
            "Память хоста для уровня L1 в ГБ; префикс должен помещаться целиком.",
            "L1 层占用的主机内存（GB）；整个前缀必须放得下。",
        ),
        _cache("KVP_L1_SIZE_GB"),
        minimum=0.1,
    ),
    Setting(
        "cache_server_evict_trigger_watermark",
        "float",
        0.9,
        Meaning(
            "Share of the budget at which eviction starts.",
            "Доля бюджета, при которой начинается вытеснение.",
            "开始淘汰时的预算占比。",
        ),
        _cache("KVP_EVICT_TRIGGER_WATERMARK"),
        minimum=0.05,
        maximum=1.0,
    ),
    Setting(
        "cache_server_evict_ratio",
        "float",
        0.1,
        Meaning(
            "Share of the used bytes that one eviction cycle reclaims.",
            "Доля занятых байтов, освобождаемая за один цикл вытеснения.",
            "每个淘汰周期回收的已用字节占比。",
        ),
        _cache("KVP_EVICT_RATIO"),
        minimum=0.01,
        maximum=1.0,
    ),
    Setting(
        "cache_server_log_level",
        "choice",
        "INFO",
        Meaning(
            "Log level of the cache server; the recovery acceptance needs INFO or DEBUG.",
            "Уровень журнала сервера кэша; для проверки восстановления нужен INFO или DEBUG.",
            "缓存服务器的日志级别；恢复验收需要 INFO 或 DEBUG。",
        ),
        ((SERVER_ENV, "LMCACHE_LOG_LEVEL"),),
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
    ),
    Setting(
        "cache_server_venv",
        "path",
        "/opt/kvpersist/engine",
        Meaning(
            "Virtual environment that has LMCache (launch mode host).",
            "Виртуальное окружение с LMCache (режим host).",
            "装有 LMCache 的虚拟环境（host 模式）。",
        ),
        _cache("KVP_CACHE_VENV"),
    ),
    Setting(
        "cache_server_image",
        "str",
        "",
        Meaning(
            "Image of the cache server, pinned by digest (launch mode docker).",
            "Образ сервера кэша, закреплённый дайджестом (режим docker).",
            "缓存服务器镜像，须以 digest 固定（docker 模式）。",
        ),
        _cache("KVP_CACHE_IMAGE"),
    ),
    Setting(
        "vllm_engine_variant",
        "choice",
        "persist",
        Meaning(
            "persist: weights on the GPUs; uva: part of the weights in host memory, read over PCIe.",
            "persist: веса на GPU; uva: часть весов в памяти хоста, чтение через PCIe.",
            "persist：权重在 GPU 上；uva：部分权重位于主机内存，经 PCIe 读取。",
        ),
        _engine("ENGINE_VARIANT"),
        choices=("persist", "uva"),
    ),
    Setting(
        "vllm_engine_venv",
        "path",
        "/opt/kvpersist/engine",
        Meaning(
            "Virtual environment that has vLLM and LMCache (launch mode host).",
            "Виртуальное окружение с vLLM и LMCache (режим host).",
            "装有 vLLM 与 LMCache 的虚拟环境（host 模式）。",
        ),
        _engine("ENGINE_VENV"),
    ),
    Setting(
        "vllm_engine_image",
        "str",
        "",
        Meaning(
            "Image of the engine, pinned by digest (launch mode docker).",
            "Образ движка, закреплённый дайджестом (режим docker).",
            "引擎镜像，须以 digest 固定（docker 模式）。",
        ),
        _engine("IMAGE"),
    ),
    Setting(
        "vllm_engine_host",
        "str",
        "127.0.0.1",
        Meaning(
            "Address on which the engine serves its OpenAI-compatible API.",
            "Адрес, на котором движок отдаёт API, совместимый с OpenAI.",
            "引擎提供 OpenAI 兼容 API 的地址。",
        ),
        _engine("ENGINE_HOST"),
        required=True,
    ),
    Setting(
        "vllm_engine_port",
        "int",
        8000,
        Meaning("Port of that API.", "Порт этого API.", "该 API 的端口。"),
        _engine("ENGINE_PORT"),
        **_PORT,  # type: ignore[arg-type]
    ),
    Setting(
        "vllm_engine_served_model_name",
        "str",
        "",
        Meaning(
            "Model name that clients use; empty takes the model id. Not part of the identity.",
            "Имя модели для клиентов; пусто — идентификатор модели. Не входит в идентичность.",
            "客户端使用的模型名；为空则取模型 id。不属于身份。",
        ),
        _engine("SERVED_MODEL_NAME"),
    ),
    Setting(
        "vllm_engine_tensor_parallel_size",
        "int",
        4,
        Meaning(
            "Tensor parallel size: GPUs that share one model.",
            "Размер тензорного параллелизма: сколько GPU делят модель.",
            "张量并行大小：共享一个模型的 GPU 数。",
        ),
        _engine("TENSOR_PARALLEL_SIZE"),
        minimum=1,
    ),
    Setting(
        "vllm_engine_max_num_seqs",
        "int",
        2,
        Meaning(
            "Requests that the engine computes at the same time.",
            "Сколько запросов движок считает одновременно.",
            "引擎同时计算的请求数。",
        ),
        _engine("MAX_NUM_SEQS"),
        minimum=1,
    ),
    Setting(
        "vllm_engine_max_model_len",
        "int",
        1048576,
        Meaning(
            "Longest context in tokens, prompt and answer.",
            "Наибольший контекст в токенах: запрос и ответ.",
            "最长上下文（token），含提示与回答。",
        ),
        _engine("MAX_MODEL_LEN"),
        minimum=1,
    ),
    Setting(
        "vllm_engine_kv_cache_dtype",
        "str",
        "auto",
        Meaning(
            "KV cache dtype as vLLM spells it; auto becomes the model's.",
            "Тип данных KV-кэша в написании vLLM; auto — тип модели.",
            "KV 缓存数据类型（vLLM 写法）；auto 取模型自身类型。",
        ),
        _engine("KV_CACHE_DTYPE"),
        required=True,
    ),
    Setting(
        "vllm_engine_block_size",
        "int",
        16,
        Meaning(
            "Tokens per KV block; the CPU build needs a multiple of 32.",
            "Токенов в блоке KV; сборке для CPU нужно кратное 32.",
            "每个 KV 块的 token 数；CPU 版本须为 32 的倍数。",
        ),
        _engine("KV_PERSIST_BLOCK_SIZE"),
        minimum=1,
    ),
    Setting(
        "vllm_engine_enforce_eager",
        "bool",
        False,
        Meaning(
            "Run without compiled graphs; part of the identity.",
            "Работать без скомпилированных графов; часть идентичности.",
            "不使用编译图运行；属于身份的一部分。",
        ),
        _engine("ENFORCE_EAGER"),
    ),
    Setting(
        "vllm_engine_gpu_memory_utilization",
        "float",
        0.9,
        Meaning(
            "Share of each GPU's memory that the engine may use (device cuda).",
            "Доля памяти каждой GPU, доступная движку (устройство cuda).",
            "引擎可用的单卡显存占比（cuda）。",
        ),
        _engine("GPU_MEMORY_UTILIZATION"),
        minimum=0.05,
        maximum=1.0,
    ),
    Setting(
        "vllm_engine_cpu_kvcache_space_gb",
        "float",
        1.0,
        Meaning(
            "Host memory of the KV cache in GiB (device cpu).",
            "Память хоста под KV-кэш в ГиБ (устройство cpu).",
            "KV 缓存占用的主机内存（GiB，cpu）。",
        ),
        _engine("CPU_KVCACHE_SPACE_GB"),
        minimum=0.1,
    ),
    Setting(
        "vllm_engine_cpu_offload_gb",
        "float",
        0.0,
        Meaning(
            "Weights per GPU in GiB that stay in host memory (variant uva).",
            "Сколько ГиБ весов на GPU остаётся в памяти хоста (вариант uva).",
            "每张 GPU 保留在主机内存中的权重（GiB，uva 变体）。",
        ),
        _engine("CPU_OFFLOAD_GB"),
        minimum=0,
    ),
    Setting(
        "vllm_engine_extra_args",
        "str",
        "",
        Meaning(
            "Further vLLM arguments, in shell quoting. Those that may change the KV become part of the identity.",
            "Дополнительные аргументы vLLM в кавычках оболочки. Те, что могут изменить KV, входят в идентичность.",
            "其他 vLLM 参数（shell 引号规则）。可能改变 KV 的参数会成为身份的一部分。",
        ),
        _engine("ENGINE_EXTRA_ARGS"),
    ),
    Setting(
        "vllm_engine_kv_persist",
        "bool",
        True,
        Meaning(
            "1 attaches the cache; 0 starts vLLM as if there were none.",
            "1 подключает кэш; 0 запускает vLLM так, будто его нет.",
            "1 接入缓存；0 则如同没有缓存一样启动 vLLM。",
        ),
        _engine("KV_PERSIST"),
    ),
    Setting(
        "vllm_engine_namespace",
        "str",
        "",
        Meaning(
            "Overrides the derived namespace; isolation is then the operator's duty.",
            "Заменяет вычисленное пространство имён; за изоляцию тогда отвечает оператор.",
            "覆盖推导出的命名空间；隔离责任由操作者承担。",
        ),
        _engine("KV_PERSIST_NAMESPACE"),
    ),
)

BY_VARIABLE: Mapping[str, Setting] = {setting.variable: setting for setting in SETTINGS}

# What roles declare, register or pass on beside the settings, among names that start like a setting.
ROLE_VARIABLES = frozenset(
    {
        "cache_server_restarted",
        "kvp_common_installed",
        "kvp_common_service",
        "kvp_common_service_result",
        "kvp_common_start_timeout",
        "kvp_rollback_to",
        "kvp_settings",
    }
)


def defaults() -> dict[str, Value]:
    """Default of every setting by variable."""
    return {setting.variable: setting.default for setting in SETTINGS}


def validate(values: Mapping[str, Any], doing: str, variables: Iterable[str] = ()) -> dict[str, Value]:
    """Types and checks values; what is missing takes its default.

    Args:
        values: raw values by variable, None where it is not set; text is converted to the setting's type.
        doing: what is being done, for the error message.
        variables: further names from the inventory that must be settings or variables of the roles.

    Raises:
        UsageError: one line that names every wrong name and value, so that a person fixes them in one go.
    """
    unknown = {*values, *(set(variables) - ROLE_VARIABLES)} - set(BY_VARIABLE)
    problems = [_not_a_setting(name, name, (*BY_VARIABLE, *ROLE_VARIABLES)) for name in sorted(unknown)]
    typed: dict[str, Value] = {}
    for setting in SETTINGS:
        try:
            typed[setting.variable] = _typed(setting, _given(values, setting))
        except ValueError as error:
            problems.append(f"{setting.variable} {error}")
    if problems:
        raise UsageError(doing, "; ".join(problems), "Correct these variables in the inventory.")
    return typed


def render_file(name: str, values: Mapping[str, Value], language: str = "en") -> str:
    """The content of one environment file.

    Args:
        name: one of :data:`FILES`.
        values: typed values by variable, as :func:`validate` returns them.
        language: language of the comments.
    """
    header = {
        "en": "Rendered from the inventory; a change here is overwritten by the next run of the playbook.",
        "ru": "Записано из инвентаря; правка здесь будет перезаписана следующим запуском плейбука.",
        "zh": "由清单渲染；此处的修改会被下一次 playbook 运行覆盖。",
    }[language]
    return _rendered(name, values, language, (header,))


def render_example(name: str, language: str) -> str:
    """An example of one environment file: every variable with its default."""
    header = {
        "en": ("Every variable with its default; empty ones are not set.", "Generated by: make docs"),
        "ru": ("Все переменные со значениями по умолчанию; пустые не заданы.", "Создаётся командой: make docs"),
        "zh": ("全部变量及其默认值；为空表示未设置。", "由 make docs 生成"),
    }[language]
    return _rendered(name, defaults(), language, header)


def _rendered(name: str, values: Mapping[str, Value], language: str, header: tuple[str, ...]) -> str:
    entries = [
        Entry(env_name, to_text(values[setting.variable]), _comment(setting, language))
        for setting, env_name in rendered_in(name)
    ]
    return render(entries, header)


def rendered_in(name: str) -> list[tuple[Setting, str]]:
    """Settings that one file holds, with their names there, in the order of the file."""
    if name not in FILES:
        raise UsageError(
            f"looking up the file {name}", "no setting is rendered there", f"Use one of {', '.join(FILES)}."
        )
    return [(setting, env_name) for setting in SETTINGS for file, env_name in setting.renders if file == name]


def read_files(texts: Mapping[str, str], environment: Mapping[str, str], folder: str) -> dict[str, Value]:
    """Reads a deployment's settings back from its files.

    Args:
        texts: content by file name.
        environment: the process environment; a variable that it sets wins over every file.
        folder: where the files lie, for error messages.

    Raises:
        UsageError: for an unreadable line, an unknown name, a missing or wrong value, or two files that contradict
            each other.
    """
    values: dict[str, str] = {}
    origin: dict[str, str] = {}
    unknown: list[str] = []
    for file, text in texts.items():
        parsed = parse(text, f"{folder}/{file}")
        unknown += _unknown_names(file, parsed)
        for setting, name in rendered_in(file):
            if name in environment:
                value, source = environment[name], f"the environment's {name}"
            elif name in parsed:
                value, source = parsed[name], f"{file}'s {name}"
            else:
                continue
            known = values.setdefault(setting.variable, value)
            if known != value:
                raise UsageError(
                    f"reading {folder}",
                    f"{origin[setting.variable]} is {known!r} but {source} is {value!r}",
                    f"They are one setting: set {setting.variable} in the inventory and run the playbook again.",
                )
            origin[setting.variable] = source
    if unknown:
        raise UsageError(
            f"reading {folder}", "; ".join(unknown), "Correct these lines, or let the playbook write the files again."
        )
    values["kvp_config_dir"] = folder
    return validate(values, f"reading {folder}")


def to_text(value: Value) -> str:
    """A value as it stands in an environment file: booleans as 0 and 1, whole floats without a point."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float) and value == int(value):
        return str(int(value))
    return str(value)


def _unknown_names(file: str, names: Iterable[str]) -> Iterable[str]:
    homes = {name: home for home in FILES for _, name in rendered_in(home)}
    here = {name for _, name in rendered_in(file)}
    for name in names:
        if name in homes and name not in here:
            yield f"{file}'s {name} belongs into {homes[name]}"
        elif name not in here:
            yield _not_a_setting(f"{file}'s {name}", name, homes)


def _not_a_setting(where: str, name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=3, cutoff=_NEAR)
    # Two letters that changed places leave several names equally near.
    near.sort(key=lambda other: sorted(other) != sorted(name))
    return f"{where} is not a setting{f' (did you mean {near[0]}?)' if near else ''}"


def _given(values: Mapping[str, Any], setting: Setting) -> Any:
    value = values.get(setting.variable)
    return setting.default if value is None else value


def _typed(setting: Setting, value: Any) -> Value:
    if setting.kind == "bool":
        return _typed_bool(value)
    if setting.kind in ("int", "float"):
        return _typed_number(setting, value)
    if not isinstance(value, str):
        raise ValueError(f"must be text, not {value!r}")
    if setting.required and not value:
        raise ValueError("is empty")
    if any(ord(character) < 32 for character in value):
        raise ValueError("has a line break or a control character")
    if setting.kind == "path" and value and not value.startswith("/"):
        raise ValueError(f"must be an absolute path, not {value!r}")
    if setting.kind == "path" and value:
        # One spelling: a path is part of keys and compared with what runs. POSIX lets two leading slashes stand.
        return "/" + posixpath.normpath(value).lstrip("/")
    if setting.kind == "choice" and value not in setting.choices:
        raise ValueError(f"must be one of {', '.join(setting.choices)}, not {value!r}")
    return value


def _typed_bool(value: Any) -> bool:
    text = str(value).lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"must be 0 or 1, not {value!r}")


def _typed_number(setting: Setting, value: Any) -> Value:
    try:
        if isinstance(value, bool) or "_" in str(value):  # Python would take True for 1 and 1_0 for 10
            raise ValueError
        number = float(value) if setting.kind == "float" else int(str(value), 10)
    except (TypeError, ValueError):
        raise ValueError(
            f"must be {'a number' if setting.kind == 'float' else 'a whole number'}, not {value!r}"
        ) from None
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"must be a finite number, not {value!r}")
    if setting.minimum is not None and number < setting.minimum:
        raise ValueError(f"must be at least {to_text(setting.minimum)}, not {value}")
    if setting.maximum is not None and number > setting.maximum:
        raise ValueError(f"must be at most {to_text(setting.maximum)}, not {value}")
    return number


def _comment(setting: Setting, language: str) -> tuple[str, ...]:
    meaning = setting.meaning.text(language)
    return (meaning, " | ".join(setting.choices)) if setting.choices else (meaning,)


def documentation(language: str) -> Iterable[tuple[str, str, str, str, str]]:
    """Rows for a reference table: variable, type, default, names in files, meaning."""
    for setting in SETTINGS:
        names = ", ".join(f"{name} ({file})" for file, name in setting.renders)
        kind = " / ".join(setting.choices) if setting.choices else setting.kind
        yield setting.variable, kind, to_text(setting.default), names, setting.meaning.text(language)
