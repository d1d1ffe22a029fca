"""Train the model of examples/serve-quickstart.toml on this project's documents: python examples/train_tiny.py

It writes examples/tiny-docs, a Llama of one million parameters in the files of a Hugging Face folder, so that the
quickstart answers in sentences. The model has seen the README, the pages of docs/ and the questions in
tiny-questions.txt many times, and nothing else: it repeats them and mixes them up, and its answers may be wrong. The
training takes minutes on two CPU cores. It needs torch, and pdflow's extra `dev` for transformers and tokenizers.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from pdflow_runtime.engines.tiny import CONFIG as TINY
from pdflow_runtime.engines.tiny import byte_tokenizer, write_folder

ROOT: Final = Path(__file__).resolve().parents[1]
SKIPPED: Final = ("bugs", "cli", "mutants", "scenario", "validation")
"""Pages of docs/ that are mostly lists and figures."""
QUESTIONS: Final = Path(__file__).with_name("tiny-questions.txt")
CONFIG: Final[dict[str, Any]] = TINY | {
    "_name_or_path": "tiny-docs",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
"""Computed in float32, in which batches change no token, and stored in float16, which halves the file."""
TOKENS: Final = 256
"""The length of a training sequence."""
SEQUENCES: Final = 8
"""The number of sequences in a step."""
PEAK_RATE: Final = 4e-3
QUESTIONS_TIMES: Final = 8
"""How often the questions appear in one pass over the text."""


def pages() -> Iterator[str]:
    """Yield the paragraphs of the README and the documents without headings, tables, code and marks."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if path.stem in SKIPPED:
            continue
        text = re.sub(r"^```.*?^```|<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        for block in re.split(r"\n\s*\n|\n(?=\s*[-*] )", text):
            words = " ".join(re.sub(r"\]\([^)]*\)|[\[\]*`]|^\s*- ", "", block).split())
            if len(words) > 60 and words[0].isupper() and words.isprintable() and "|" not in words:
                yield words


def questions() -> list[str]:
    """Return the chats of the file, in which a line is a question and the next line its answer, and the answers alone,
    which a completion can continue."""
    lines = [line for line in QUESTIONS.read_text(encoding="utf-8").splitlines() if line]
    asked, answers = lines[::2], lines[1::2]
    chats = [f"user: {question}\nassistant: {answer}" for question, answer in zip(asked, answers, strict=True)]
    return chats + list(dict.fromkeys(answers))


def sequences(tokenizer: Tokenizer, texts: Sequence[str], chats: Sequence[str]) -> Iterator[torch.Tensor]:
    """Yield batches `[SEQUENCES, TOKENS]` without end: in each pass the texts in another order."""
    coded = [[*tokenizer.encode(text).ids, CONFIG["eos_token_id"]] for text in (*texts, *chats * QUESTIONS_TIMES)]
    stream: list[int] = []
    batch = SEQUENCES * TOKENS
    while True:
        for index in torch.randperm(len(coded)).tolist():
            stream += coded[index]
            if len(stream) >= batch:
                yield torch.tensor(stream[:batch]).view(SEQUENCES, TOKENS)
                stream = stream[batch:]


def train(tokenizer: Tokenizer, texts: Sequence[str], chats: Sequence[str], steps: int) -> LlamaForCausalLM:
    """Return a model that has been trained for so many steps."""
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    norms = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, steps + 1, pct_start=0.06)
    batches = sequences(tokenizer, texts, chats)
    begun = time.monotonic()
    for step in range(1, steps + 1):
        batch = next(batches)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 25 == 0 or step == steps:
            print(f"step {step} of {steps}: loss {loss.item():.3f}, {time.monotonic() - begun:.0f} s", flush=True)
    return model


def write(folder: Path, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Write the files of a Hugging Face folder, without the head, which is the embedding."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.half().contiguous() for name, weight in model.state_dict().items() if name != "lm_head.weight"
    }
    write_folder(folder, weights, tokenizer, CONFIG)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("tiny-docs"), help="the folder to write")
    parser.add_argument("--steps", type=int, default=600, help="training steps of 2,048 tokens each")
    asked = parser.parse_args()
    torch.manual_seed(1)
    texts, chats = list(dict.fromkeys(pages())), questions()
    tokenizer = byte_tokenizer([*texts, *chats], CONFIG["vocab_size"])
    print(
        f"{len(texts)} paragraphs and {len(chats)} chats and answers, {sum(map(len, texts)):,} characters", flush=True
    )
    write(asked.out, train(tokenizer, texts, chats, asked.steps), tokenizer)
    print(f"wrote {asked.out}")


if __name__ == "__main__":
    sys.exit(main())
