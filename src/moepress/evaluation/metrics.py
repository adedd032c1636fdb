"""What answers are worth, as shares from 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from moepress.tasks import Example, Task

ARTICLES = re.compile(r"\b(a|an|the)\b")


def task_scores(task: Task, examples: Sequence[Example], chosen: Sequence[int]) -> dict[str, float]:
    """The metrics of a task whose answers were chosen; -1 is an answer that is none of the choices."""
    labels = [example.label for example in examples]
    known = {"accuracy": accuracy, "f1": f1_of_yes}
    return {name: known[name](labels, chosen) for name in task.metrics}


def accuracy(labels: Sequence[int], chosen: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(labels, chosen, strict=True)) / len(labels)


def f1_of_yes(labels: Sequence[int], chosen: Sequence[int]) -> float:
    """F1 of the second choice over all examples (in MultiRC: F1a)."""
    both = sum(a == b == 1 for a, b in zip(labels, chosen, strict=True))
    either = sum(a == 1 for a in labels) + sum(b == 1 for b in chosen)
    return 2 * both / either if either else 0.0


def written_scores(task: Task, references: Sequence[Sequence[str]], written: Sequence[str]) -> dict[str, float]:
    """SQuAD's exact match and F1 of words, each against the reference that suits best."""
    known = {"exact_match": same_words, "f1": f1_of_words}
    return {
        name: sum(max(known[name](right, text) for right in rights) for rights, text in zip(references, written))
        / len(written)
        for name in task.metrics
    }


def words_of(text: str) -> list[str]:
    """The words that SQuAD compares: lower case, without punctuation and articles."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return ARTICLES.sub(" ", kept).split()


def same_words(one: str, other: str) -> bool:
    return words_of(one) == words_of(other)


def f1_of_words(right: str, text: str) -> float:
    wanted, said = words_of(right), words_of(text)
    if not wanted or not said:
        return float(wanted == said)
    common = (Counter(wanted) & Counter(said)).total()
    return 2 * common / (len(wanted) + len(said))
