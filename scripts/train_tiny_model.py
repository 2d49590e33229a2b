"""Train ``holdfast-tiny``, the small real model that the demo, the tests and chaos runs use.

A byte-level BPE and a 4M-parameter Llama, trained on Python's own documentation: the docstrings of
the standard library and ``pydoc_data.topics`` (Python Software Foundation License). Half of the
documents are written as conversations in the chat template, so that the model answers chats with
text that reads like the Python manual.

Run by ``make tiny-model``. The same Python, torch and thread count give the same weights; about 25
minutes on two cores. Loss is printed as it falls; the folder that results is what
``holdfast serve`` loads when no ``--model`` is given.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import math
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

END_OF_TEXT, SYSTEM, USER, ASSISTANT, END = "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIALS = [END_OF_TEXT, SYSTEM, USER, ASSISTANT, END]

# Every message ends with <|end|>, the same token the model stops with, so that the rendered history
# is byte for byte what the session already holds and a chat turn extends its KV instead of redoing it.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTIONS = ["What does {} do?", "Explain {}.", "help({})", "Tell me about {}.", "How do I use {}?"]
SKIPPED = {"test", "tests", "idlelib", "site-packages", "lib2to3", "__pycache__", "turtledemo", "pydoc_data"}
VOCAB_SIZE = 2048
CONTEXT_LEN = 4096
# Most steps see short windows, where tokens are cheapest; the last tenth sees the whole context,
# without which positions past the training window decode into noise.
PHASES = ((512, 0.9), (CONTEXT_LEN, 0.1))


def docstrings_by_module() -> dict[str, list[tuple[str, str]]]:
    """Qualified name and cleaned docstring of everything documented in the standard library's sources."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED & set(parts):
            continue
        module = ".".join(p for p in parts if p != "__init__")
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        entries = list(_walk(tree, module))
        if entries:
            found[module] = entries
    for name in sorted(sys.builtin_module_names):
        module_object = __import__(name)
        members = ((f"{name}.{k}", inspect.getdoc(v)) for k, v in sorted(vars(module_object).items()))
        entries = [(k, doc) for k, doc in members if doc and len(doc) > 20]
        if entries:
            found.setdefault(name, []).extend(entries)
    return found


def _walk(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        doc = ast.get_docstring(node)
        if doc and len(doc) > 20:
            yield name, doc
    for child in getattr(node, "body", []):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _walk(child, f"{name}.{child.name}")


def build_documents(rng: random.Random) -> list[str]:
    from pydoc_data.topics import topics

    documents = [f"{text.strip()}{END_OF_TEXT}" for _, text in sorted(topics.items())]
    for name, text in sorted(topics.items()):
        documents.append(_message("user", rng.choice(QUESTIONS).format(name)) + _message("assistant", text.strip()))
    for _module, entries in sorted(docstrings_by_module().items()):
        documents.append("\n\n".join(f"{name}\n{doc}" for name, doc in entries) + END_OF_TEXT)
        # One conversation per module, several questions long: what a session looks like.
        for start in range(0, len(entries), 8):
            turns = [
                _message("user", rng.choice(QUESTIONS).format(name)) + _message("assistant", doc)
                for name, doc in entries[start : start + 8]
            ]
            documents.append("".join(turns))
    rng.shuffle(documents)
    return documents


def _message(role: str, content: str) -> str:
    return f"<|{role}|>{content}{END}"


def train_tokenizer(documents: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def train(tokens: torch.Tensor, config: LlamaConfig, token_budget: int, batch_tokens: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    model = LlamaForCausalLM(config)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), fused=True)
    steps = token_budget // batch_tokens
    started = time.monotonic()
    for step in range(steps):
        window = PHASES[0][0] if step < steps * PHASES[0][1] else PHASES[1][0]
        progress = step / steps
        rate = 2e-3 * min(1.0, (step + 1) / 60) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(tokens) - window - 1, (batch_tokens // window,), generator=rng)
        batch = torch.stack([tokens[s : s + window + 1] for s in starts.tolist()])
        # fp32: CPUs without AVX512-BF16 or AMX emulate bf16 products, a hundred times slower.
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == steps - 1:
            rate_tokens = (step + 1) * batch_tokens / (time.monotonic() - started)
            print(f"step {step}/{steps} window {window} loss {loss.item():.3f} {rate_tokens:.0f} tok/s", flush=True)
    return model


def write_checkpoint(out: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, config: LlamaConfig) -> None:
    out.mkdir(parents=True, exist_ok=True)
    state = {k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    eos_ids = [tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)]
    saved = config.to_dict() | {"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"], "eos_token_id": eos_ids}
    for name, value in (
        ("config.json", saved),
        ("generation_config.json", {"eos_token_id": eos_ids, "pad_token_id": eos_ids[1]}),
        (
            "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END,
                "pad_token": END_OF_TEXT,
                "model_max_length": CONTEXT_LEN,
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            },
        ),
    ):
        (out / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("workers/models/bundled/holdfast-tiny"))
    parser.add_argument("--tokens", type=int, default=6_000_000, help="how many tokens to train on")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    args = parser.parse_args()
    torch.set_num_threads(2)
    documents = build_documents(random.Random(0))
    tokenizer = train_tokenizer(documents)
    ids = [i for encoding in tokenizer.encode_batch(documents) for i in encoding.ids]
    print(f"{len(documents)} documents, {len(ids)} tokens", flush=True)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_LEN,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    model = train(torch.tensor(ids), config, args.tokens, args.batch_tokens)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters")
    write_checkpoint(args.out, model, tokenizer, config)


if __name__ == "__main__":
    main()
