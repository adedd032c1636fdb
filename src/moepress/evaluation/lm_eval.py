"""A bridge to EleutherAI's lm-evaluation-harness, which has the usual benchmarks.

`python -m moepress.evaluation.lm_eval …` is the harness's own command, which then also loads compact checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from moepress.errors import MoepressError

MISSING = "this needs the evaluation harness: pip install 'lm_eval[hf]'"


def lm_eval_model(
    path_or_model: str | Path | PreTrainedModel, tokenizer: Any = None, *, batch_size: int = 8, **options: Any
) -> Any:
    """The harness's `HFLM` on a moepress checkpoint, compact or vanilla, or on a model in memory.

    Give it to `lm_eval.simple_evaluate(model=…, tasks=[…])`. `options` go to `HFLM`.
    """
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError:
        raise MoepressError(MISSING) from None
    if isinstance(path_or_model, PreTrainedModel):
        model = path_or_model
        if tokenizer is None:
            raise MoepressError("a model in memory needs its tokenizer beside it: lm_eval_model(model, tokenizer)")
    else:
        from moepress.checkpoint.load import load_model, load_tokenizer

        model = load_model(path_or_model)
        tokenizer = load_tokenizer(path_or_model) if tokenizer is None else tokenizer
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, **options)


def main() -> None:
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        raise SystemExit(f"moepress: {MISSING}") from None
    cli_evaluate()


if __name__ == "__main__":
    main()
