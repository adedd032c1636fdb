"""Answers in words: what a model writes by itself, and what it would say word for word after the right ones.

Shape suffixes: B prompts, L tokens of a row, N new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from moepress.data.batches import NO_LABEL, answer_batches, is_encoder_decoder, pad_id, prompt_batches, vocabulary_of
from moepress.evaluation.logits import logits_of, pieces
from moepress.evaluation.precision import evaluating
from moepress.progress import track
from moepress.tasks import Example, Task


def written_answers(
    model: PreTrainedModel,
    task: Task,
    examples: Sequence[Example],
    tokenizer: Any,
    batch_size: int = 32,
    length: int = 512,
    new: int = 32,
    dtype: torch.dtype | None = torch.float32,
) -> list[str]:
    """Greedy answers of at most `new` tokens. A decoder-only model goes on after its answer: the first line counts."""
    prompts = [example.prompt for example in examples]
    device = next(model.parameters()).device
    whole = is_encoder_decoder(model.config)
    answers: list[str] = []
    with evaluating(model, dtype=dtype):
        for inputs in track(prompt_batches(prompts, tokenizer, model.config, batch_size, length), f"task {task.name}"):
            out_BL = model.generate(  # type: ignore[operator]
                **{name: tensor.to(device) for name, tensor in inputs.items()},
                max_new_tokens=new,
                do_sample=False,
                num_beams=1,
                pad_token_id=pad_id(tokenizer, model.config),
            )
            new_BN = out_BL if whole else out_BL[:, inputs["input_ids"].shape[1] :]
            texts = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in new_BN.cpu()]
            answers += texts if whole else [text.partition("\n")[0].strip() for text in texts]
    return answers


def forced_answers(
    model: PreTrainedModel,
    task: Task,
    examples: Sequence[Example],
    tokenizer: Any,
    batch_size: int = 32,
    length: int = 512,
    dtype: torch.dtype | None = torch.float32,
) -> list[str]:
    """What the model finds most probable in each place of the right answer, given all the places before it: how the
    authors of MC-SMoE measure. It flatters, since the right answer is shown."""
    pairs = [(example.prompt, example.answer) for example in examples]
    answers: list[str] = []
    with evaluating(model, dtype=dtype):
        for batch in track(
            answer_batches(pairs, tokenizer, model.config, batch_size, length, task.separator), f"task {task.name}"
        ):
            for inputs, labels_BL in pieces(batch, vocabulary_of(model.config)):
                best_BL = logits_of(model, inputs).argmax(-1).cpu()
                for best_L, labels_L in zip(best_BL, labels_BL, strict=True):
                    ids = best_L[labels_L != NO_LABEL]
                    answers.append(tokenizer.decode(ids, skip_special_tokens=True).strip())
    return answers


def choice_named(example: Example, text: str) -> int:
    """The choice that a text names, or -1."""
    named = [choice.strip().lower() for choice in example.choices]
    return named.index(text.lower()) if text.lower() in named else -1
