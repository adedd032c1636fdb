"""Messages and how they become text."""

from __future__ import annotations

from typing import Any

from moepress.errors import MoepressError

Turn = dict[str, str]
SHARED_GPT_ROLES = {"human": "user", "gpt": "assistant", "bard": "assistant", "function": "tool", "observation": "tool"}


def turns_of(value: Any, where: str) -> list[Turn]:
    """Messages as `role` / `content`, or `from` / `value` as in ShareGPT files."""
    if not isinstance(value, list) or not value:
        raise MoepressError(f"{where}: expected a text or a list of messages, found {type(value).__name__}")
    turns: list[Turn] = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise MoepressError(f"{where}: message {number} is not an object with role and content")
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise MoepressError(
                f"{where}: message {number} needs role and content (or from and value) as text; it has "
                f"{', '.join(message)}"
            )
        turns.append({"role": SHARED_GPT_ROLES.get(role, role), "content": content})
    return turns


def render(
    turns: list[Turn], tokenizer: Any, chat_template: bool | None, where: str, continue_as_assistant: bool = False
) -> str:
    """The text of a conversation: by the tokenizer's template, or with `chat_template=False` its contents in turn."""
    if chat_template is False:
        return "\n\n".join(turn["content"] for turn in turns)
    if not getattr(tokenizer, "chat_template", None):
        raise MoepressError(
            f"{where} holds messages, but the tokenizer has no chat template; "
            "chat_template=false joins them as plain text"
        )
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=continue_as_assistant)
    except Exception as error:  # a template is a program of its own: it may refuse roles or orders in any way
        raise MoepressError(f"{where}: the tokenizer's chat template refuses these messages: {error}") from error
