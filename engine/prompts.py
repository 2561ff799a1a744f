"""Prompts as users give them, to token ids."""

from typing import Any

from transformers import BatchEncoding

from .config import is_int

_PROBE = "a part of a message"
_COMPOSED = (str, list, tuple, dict, BatchEncoding)  # what is no token id, and was not meant as one


def split(prompts: Any) -> tuple[list[Any], bool]:
    """A list of prompts, and whether only one was given.

    A string, ids (in a list, a tensor, an array or what a tokenizer returns for one text) and a list of chat messages are one
    prompt; a list of prompts is several, and so is what a tokenizer returns for a list of texts (but for a tensor of one row, as
    which it returns one text as well).

    Raises:
        ValueError: for an empty list, or what is no prompt at all.
    """
    if isinstance(prompts, BatchEncoding) and (several := _of_several_texts(prompts)):
        return several, False
    if isinstance(prompts, str | BatchEncoding) or _is_array(prompts):
        return [prompts], True
    if not isinstance(prompts, list | tuple):
        raise ValueError(
            f"prompts must be a string, token ids, chat messages, or a list of these, got {type(prompts).__name__}"
        )
    if not prompts:
        raise ValueError(f"prompts must not be empty, got {prompts!r}")
    if all(isinstance(item, dict) for item in prompts) or not any(
        isinstance(item, _COMPOSED) or _is_array(item) for item in prompts
    ):
        return [prompts], True
    return list(prompts), False


def encode(prompt: Any, name: str, tokenizer: Any, vocab_size: int, max_length: int) -> list[int]:
    """Token ids of one prompt.

    Args:
        prompt: text; token ids, as a list, a tensor, an array or what a tokenizer returns for one text; or chat messages, rendered
            with the tokenizer's chat template. A last message of the assistant is continued, as `transformers`' pipeline does.
        name: how messages call it, such as "prompts[2]".
        tokenizer: None where prompts can only be ids.
        vocab_size: ids are below this.
        max_length: the ids and one new token must fit in.

    Raises:
        ValueError: naming the prompt and the rule that it breaks.
    """
    if isinstance(prompt, BatchEncoding):
        if "input_ids" not in prompt:
            raise ValueError(f"{name} must have input_ids, got {', '.join(prompt) or 'nothing'}")
        prompt = _unpadded(prompt)
    if _is_array(prompt):
        if prompt.ndim == 2 and len(prompt) == 1:  # as a tokenizer makes it of one text
            prompt = prompt[0]
        if prompt.ndim != 1:
            raise ValueError(f"{name} must be a 1-D tensor or array of ids, got the shape {list(prompt.shape)}")
        prompt = prompt.tolist()
    if not isinstance(prompt, str | list | tuple):
        raise ValueError(f"{name} must be a string, token ids or chat messages, got {type(prompt).__name__}")
    if not prompt:
        raise ValueError(f"{name} must not be empty, got {prompt!r}")
    if isinstance(prompt, str):
        check_unicode(prompt, name)
        ids = list(_need(tokenizer, name, "text")(prompt)["input_ids"])
    elif all(isinstance(item, dict) for item in prompt):
        ids = _render_chat(list(prompt), name, _need(tokenizer, name, "chat messages"))
    else:
        ids = list(prompt)
    made = isinstance(prompt, str) or isinstance(prompt[0], dict)
    for token in ids:
        if not is_int(token) or not 0 <= token < vocab_size:
            holder = f"what the tokenizer makes of {name}" if made else name
            raise ValueError(f"{holder} must hold token ids in [0, {vocab_size}), got {token!r}")
    if not ids:
        raise ValueError(f"{name} must hold at least one token, got none")
    if len(ids) >= max_length:
        raise ValueError(
            f"{name} has {len(ids)} tokens; at most {max_length - 1} leave room for a new one in max_length = {max_length}"
        )
    return [int(token) for token in ids]


def _unpadded(encoding: BatchEncoding) -> Any:
    """The ids of what a tokenizer returns for one text, without those that its attention mask leaves out."""
    ids, mask = (_of_one_text(encoding.get(name)) for name in ("input_ids", "attention_mask"))
    if mask is None or ids is None:
        return ids
    _check_mask(ids, mask)
    return [token for token, seen in zip(_listed(ids), _listed(mask), strict=True) if seen]


def _of_several_texts(encoding: BatchEncoding) -> list[BatchEncoding]:
    """What a tokenizer returns for a list of texts, text by text; empty for one text, as which a tensor [1, T] counts too."""
    ids: Any = encoding.get("input_ids")
    if not _is_batch(ids) or (_is_array(ids) and len(ids) == 1):
        return []
    fields = {name: encoding[name] for name in ("input_ids", "attention_mask") if encoding.get(name) is not None}
    _check_mask(ids, fields.get("attention_mask", ids))
    return [BatchEncoding({name: rows[index] for name, rows in fields.items()}) for index in range(len(ids))]


def _check_mask(ids: Any, mask: Any) -> None:
    """Raise ValueError if a mask is not as long as the ids, of one text, or of as many texts."""
    try:
        fits = len(ids) == len(mask)
    except TypeError:  # a number has no length
        fits = False
    if not fits:
        raise ValueError(f"attention_mask must have the shape of input_ids, got {mask!r:.60} with {ids!r:.60}")


def _of_one_text(values: Any) -> Any:
    """The only row of a batch of one."""
    return values[0] if _is_batch(values) and len(values) == 1 else values


def _is_batch(values: Any) -> bool:
    """Whether these are ids, or a mask, of texts, and not of one text."""
    if _is_array(values):
        return bool(values.ndim == 2)
    return isinstance(values, list | tuple) and len(values) > 0 and all(isinstance(row, list | tuple) for row in values)


def _render_chat(messages: list[dict[str, Any]], name: str, tokenizer: Any) -> list[int]:
    for message in messages:
        content = message.get("content")
        said = isinstance(content, str) or _is_text_parts(content) or (content is None and message.get("tool_calls"))
        if not said or not isinstance(message.get("role"), str):
            raise ValueError(
                f"{name} must hold chat messages with 'role' and 'content', both strings, got {message!r:.200}"
            )
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{name} holds chat messages, but the tokenizer has no chat template: pass text instead")
    contents = [message.get("content") for message in messages]
    if any(map(_is_text_parts, contents)) and not _renders_parts(tokenizer):
        messages = [{**message, "content": _joined(message.get("content"))} for message in messages]
    elif any(isinstance(each, str) for each in contents) and not _renders_strings(tokenizer):
        messages = [{**message, "content": _in_parts(message.get("content"))} for message in messages]
    begun = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=not begun, continue_final_message=begun, tokenize=False
        )
    except Exception as error:  # a template is a program of its own, with errors of its own
        raise ValueError(f"{name} must hold chat messages that the chat template takes: {error}") from error
    check_unicode(text, name)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _is_text_parts(content: Any) -> bool:
    """A list of {"type": "text", "text": ...}, as clients of multimodal models send it."""
    return (
        isinstance(content, list)
        and len(content) > 0
        and all(isinstance(part, dict) and part.get("type") == "text" for part in content)
        and all(isinstance(part.get("text"), str) for part in content)
    )


def _renders_parts(tokenizer: Any) -> bool:
    """Whether the chat template knows what to do with such a list; one that does not fails, or prints it as it is."""
    text = _rendered(tokenizer, [{"type": "text", "text": _PROBE}])
    return _PROBE in text and "'type'" not in text and '"type"' not in text


def _renders_strings(tokenizer: Any) -> bool:
    """Whether the chat template shows a content that is a string. Some of models that take images show lists alone."""
    return _PROBE in _rendered(tokenizer, _PROBE) or not _renders_parts(tokenizer)


def _rendered(tokenizer: Any, content: Any) -> str:
    """A message with this content; empty where the chat template fails."""
    messages = [{"role": "user", "content": content}]
    try:
        text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception:  # of many kinds, as templates are programs
        return ""
    return text


def _joined(content: Any) -> Any:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def _in_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def check_unicode(text: str, name: str) -> None:
    """No half of a surrogate pair, as which Python hands on bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start]
        raise ValueError(f"{name} must be valid Unicode text, got {found!r} at index {error.start}") from error


def _need(tokenizer: Any, name: str, kind: str) -> Any:
    if tokenizer is None:
        raise ValueError(
            f"{name} is {kind}, which needs a tokenizer: give one (tokenizer= of engine.load, or --tokenizer), or token ids"
        )
    return tokenizer


def _is_array(value: Any) -> bool:
    """A tensor or an array, of which those without a dimension are numbers."""
    return getattr(value, "ndim", 0) > 0


def _listed(values: Any) -> list[Any]:
    return values.tolist() if _is_array(values) else list(values)
