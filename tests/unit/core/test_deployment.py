"""What spans several settings: contradictions are found, all of them, before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvpersist.core.deployment import LOSSY_CODECS, Deployment
from kvpersist.core.errors import EXIT_USAGE, UsageError

Deploy = Callable[..., Deployment]
DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("mode", "device", "overrides", "problem"),
    [
        ("host", "cuda", {"kvp_codec": "fp8"}, "LMCACHE_L2_SERDE=fp8 is LOSSY and is not supported (kvp_codec)"),
        (
            "host",
            "cuda",
            {"kvp_codec": "zip"},
            "LMCACHE_L2_SERDE=zip is not a codec of kvpersist, which has none",
        ),
        (
            "host",
            "cuda",
            {"cache_server_l2_backend": "raw_block", "kvp_codec": "zstd"},
            "LMCACHE_L2_SERDE=zstd is not a codec of raw_block, which has none",
        ),
        (
            "host",
            "cuda",
            {"cache_server_l2_backend": "nixl_store_dynamic", "cache_server_l1_size_gb": 63.7},
            "cache_server_l1_size_gb 63.7 is not a whole number of pages of 4096 bytes (as GiB)",
        ),
        (
            "host",
            "cuda",
            {"cache_server_l2_backend": "raw_block", "vllm_engine_extra_args": "-sc '{}'"},
            "raw_block needs the size of an object beforehand, which speculative decoding changes",
        ),
        ("host", "cuda", {"kvp_cache_host": "10.0.0.5"}, "kvp_cache_host 10.0.0.5 is not loopback"),
        ("host", "cuda", {"kvp_cache_host": "0.0.0.0"}, "kvp_cache_host 0.0.0.0 is not loopback"),  # noqa: S104
        ("host", "cuda", {"kvp_cache_host": "127.0.0.1.example.org"}, "is not loopback"),
        ("host", "cuda", {"kvp_cache_port": 8080}, "kvp_cache_port and kvp_cache_http_port are both 8080"),
        ("host", "cuda", {"vllm_engine_port": 5555}, "vllm_engine_port 5555 is also a port of the cache server"),
        ("host", "cuda", {"vllm_engine_port": 8080}, "vllm_engine_port 8080 is also a port of the cache server"),
        (
            "host",
            "cuda",
            {"kvp_chunk_size": 250},
            "kvp_chunk_size 250 is not a multiple of vllm_engine_block_size 16",
        ),
        (
            "host",
            "cuda",
            {"vllm_engine_block_size": 512},
            "kvp_chunk_size 256 is not a multiple of vllm_engine_block_size 512",
        ),
        (
            "host",
            "cpu",
            {"vllm_engine_block_size": 16},
            "vllm_engine_block_size 16 is not a multiple of 32, which device cpu needs",
        ),
        ("host", "cuda", {"kvp_model_revision": "main"}, "KVP_MODEL_REVISION must be a full 40-hex SHA, not 'main'"),
        ("host", "cuda", {"kvp_model_revision": "A" * 40}, "KVP_MODEL_REVISION must be a full 40-hex SHA"),
        ("host", "cuda", {"kvp_model_revision": "a" * 41}, "KVP_MODEL_REVISION must be a full 40-hex SHA"),
        (
            "host",
            "cpu",
            {"vllm_engine_variant": "uva", "vllm_engine_cpu_offload_gb": 1},
            "vllm_engine_variant uva needs kvp_device cuda",
        ),
        ("host", "cuda", {"vllm_engine_variant": "uva"}, "offloads nothing while vllm_engine_cpu_offload_gb is 0"),
        ("host", "cuda", {"vllm_engine_venv": ""}, "vllm_engine_venv is empty, and launch mode host needs it"),
        ("host", "cuda", {"cache_server_venv": ""}, "cache_server_venv is empty, and launch mode host needs it"),
        ("docker", "cuda", {"vllm_engine_image": ""}, "vllm_engine_image is empty, and launch mode docker needs it"),
        ("docker", "cuda", {"cache_server_image": ""}, "cache_server_image is empty, and launch mode docker needs it"),
        *(
            ("docker", "cuda", {variable: image}, f"{variable} {image!r} is a floating tag")
            for variable in ("vllm_engine_image", "cache_server_image")
            for image in (
                "vllm/vllm-openai",
                "vllm/vllm-openai:latest",
                "vllm/vllm-openai:v0.32.0",
                "vllm/vllm-openai@sha256:abc",
                f"vllm/vllm-openai@{DIGEST}0",
                f"vllm/vllm-openai@{DIGEST.upper()}",
                f"@{DIGEST}",
                f"a b@{DIGEST}",
            )
        ),
    ],
)
def test_a_contradiction_is_named(
    mode: str, device: str, overrides: dict[str, Any], problem: str, deploy: Deploy
) -> None:
    deploy(mode, device)  # it is the override that is wrong
    with pytest.raises(UsageError) as caught:
        deploy(mode, device, **overrides)
    assert problem in caught.value.cause
    assert caught.value.exit_code == EXIT_USAGE


def test_all_contradictions_are_named_in_one_line(deploy: Deploy) -> None:
    with pytest.raises(UsageError) as caught:
        deploy(
            "docker",
            kvp_codec="zip",
            kvp_cache_port=8080,
            vllm_engine_port=8080,
            cache_server_image="lmcache:latest",
            vllm_engine_image="vllm:latest",
            kvp_model_revision="main",
        )
    message = str(caught.value)
    assert "\n" not in message
    for part in ("kvp_codec", "are both 8080", "vllm_engine_port 8080", "'lmcache:latest'", "'vllm:latest'", "40-hex"):
        assert part in message


@pytest.mark.parametrize("codec", [*LOSSY_CODECS, "fp8_e4m3", "cachegen-2"])
def test_every_lossy_codec_is_refused_as_lossy(codec: str, deploy: Deploy) -> None:
    with pytest.raises(UsageError, match=f"LMCACHE_L2_SERDE={codec} is LOSSY and is not supported"):
        deploy(kvp_codec=codec)


@pytest.mark.parametrize("image", [f"vllm/vllm-openai@{DIGEST}", f"reg.example:5000/a/b:v1@{DIGEST}"])
def test_an_image_with_a_digest_is_accepted(image: str, deploy: Deploy) -> None:
    deployment = deploy("docker", vllm_engine_image=image, cache_server_image=image)
    assert (deployment.engine.image, deployment.cache.image) == (image, image)


@pytest.mark.parametrize(
    ("mode", "overrides"),
    [
        ("host", {"vllm_engine_image": "vllm:latest"}),  # what the other launch mode needs is not looked at
        ("docker", {"vllm_engine_venv": "", "cache_server_venv": ""}),
        ("host", {"kvp_cache_host": "localhost"}),
        ("host", {"kvp_model_revision": "0123456789abcdef0123456789abcdef01234567"}),
        ("host", {"vllm_engine_variant": "uva", "vllm_engine_cpu_offload_gb": 0.5}),
        ("host", {"vllm_engine_block_size": 256}),
    ],
)
def test_what_is_no_contradiction_passes(mode: str, overrides: dict[str, Any], deploy: Deploy) -> None:
    deploy(mode, **overrides)


def test_the_cpu_s_block_size_matters_only_with_the_cache(deploy: Deploy) -> None:
    deploy(device="cpu", vllm_engine_block_size=16, vllm_engine_kv_persist=False)


def test_both_sides_get_the_same_connection(deploy: Deploy) -> None:
    deployment = deploy(kvp_cache_host="localhost", kvp_cache_port=6001)
    assert (deployment.cache.host, deployment.cache.port) == ("localhost", 6001)
    assert (deployment.engine.cache_host, deployment.engine.cache_port) == ("localhost", 6001)


def test_the_served_name_is_the_model_id_unless_given(deploy: Deploy) -> None:
    assert deploy().engine.served_model_name == "org/Llama"
    assert deploy(vllm_engine_served_model_name="chat").engine.served_model_name == "chat"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),  # noqa: S104
        ("gpu-1", "http://gpu-1:8000"),
        ("::1", "http://[::1]:8000"),
        ("::", "http://[::1]:8000"),
    ],
)
def test_the_engine_s_url_can_be_asked_from_the_host(host: str, url: str, deploy: Deploy) -> None:
    assert deploy(vllm_engine_host=host).engine.url == url


def test_the_container_is_named_after_family_and_tensor_parallel_size(deploy: Deploy) -> None:
    engine = deploy(kvp_model_family="mimo-pro").engine
    assert engine.container == "mimo-pro-tp4-kvp"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ()),
        ("--a 1  --b", ("--a", "1", "--b")),
        ('--a \'{"x": "y z"}\'', ("--a", '{"x": "y z"}')),
        ('--a "b c" d\\ e', ("--a", "b c", "d e")),
    ],
)
def test_extra_arguments_are_split_as_a_shell_does(text: str, words: tuple[str, ...], deploy: Deploy) -> None:
    assert deploy(vllm_engine_extra_args=text).engine.extra_args == words


@pytest.mark.parametrize("text", ["--a 'b", '--a "b', "--a b\\"])
def test_extra_arguments_with_an_open_quote_are_refused(text: str, deploy: Deploy) -> None:
    with pytest.raises(UsageError, match=r"reading vllm_engine_extra_args: .*Quote the arguments as for a shell"):
        deploy(vllm_engine_extra_args=text)
