"""Marks around the thoughts of a model, and around its answer.

Most models write a mark before their thoughts and one after them. Others write messages, each with
a header that names its channel or its recipient:

    gpt-oss (Harmony)  <|channel|>analysis<|message|>...<|end|>
                       <|start|>assistant<|channel|>final<|message|>...<|return|>
                       <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}

The marks of a model are those in its chat template and among its added tokens. Tags are paired by
their names, so that this finds tags that no table has, such as ``<seed:think>``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

# Added tokens that are looked at, and their characters
_MAX_TOKENS, _MAX_MARK = 10_000, 64
_MAX_SHOWN = 256
_TAG = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z][A-Z_ ]{2,40}\]|◁[^▷◁\s]{1,40}▷")
_NAME = re.compile(r"think|thought|reason|reflect|ponder|rationale|scratchpad|inner", re.IGNORECASE)
_OPPOSITES = (
    ("begin", "end"),
    ("start", "end"),
    ("BEGIN", "END"),
    ("START", "END"),
    ("open", "close"),
    ("prefix", "suffix"),
)
# Of models whose marks are not two tags with names
_PAIRS = (
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|think|>", "<|end|>"),  # Solar Open
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi K3
    ("Here is my thought process:", "Here is my response:"),  # Granite 3.2
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
)
_ANSWERS = (
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),  # Command
    ("<|START_TEXT|>", "<|END_TEXT|>"),
    ("<|begin_of_solution|>", "<|end_of_solution|>"),
    ("<response>", "</response>"),  # Granite 3.3, ERNIE
    ("<answer>", "</answer>"),  # Hunyuan
    ("<|begin|>assistant<|content|>", "<|end|>"),  # Solar Open
    ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),  # Kimi K3
)
# Tokens that frame turns, fill gaps or stand for other media: they are no part of an answer
_STRUCTURE = re.compile(
    r"pad|unk|bos|eos|mask|\bsep\b|cls|reserved|unused|extra_|endof(text|prompt)|end.?of.?(text|turn|sent|utt)"
    r"|begin.?of.?(text|sent)|start.?of.?(turn|role)|end.?of.?(role|plugin)|\beo[tm]\b|eo[tm]_id"
    r"|im_(start|end)|header|fim|prefix|suffix|middle|file|repo|vision|image|img|audio|video|object"
    r"|box|quad|^</?s>$|\d{2,}\W*$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class HeaderFormat:
    """Messages with headers: a header follows one of ``starts`` and ends with ``end``."""

    starts: tuple[str, ...] = ("<|start|>", "<|channel|>")
    end: str = "<|message|>"
    # After the body of a message
    closes: tuple[str, ...] = ("<|end|>", "<|call|>", "<|return|>", "<|eom|>")

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks; ``<|constrain|>`` is a part of headers."""
        return (*self.starts, self.end, *self.closes, "<|constrain|>")


HEADERS = HeaderFormat()


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """The marks of a model.

    thoughts, answers: the mark after thoughts, and after an answer, by the one before. headers: of
    models that write messages. unopened: marks after thoughts that begin without a mark. shown:
    special tokens with another meaning, which stay in the text.
    """

    thoughts: dict[str, str] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    headers: HeaderFormat | None = None
    unopened: frozenset[str] = frozenset()
    shown: frozenset[str] = frozenset()

    @property
    def has_thoughts(self) -> bool:
        return bool(self.thoughts) or self.headers is not None

    @property
    def marks(self) -> frozenset[str]:
        """Texts that are not part of thoughts or answers, with the special tokens in them."""
        pairs = (*self.thoughts.items(), *self.answers.items())
        marks = {mark for pair in pairs for mark in pair}
        marks.update(self.headers.marks if self.headers else ())
        return frozenset(marks | {tag for mark in marks for tag in _TAG.findall(mark)})

    def ends_in_header(self, prompt: str) -> bool:
        """Return True if a prompt ends in the header of a message."""
        if self.headers is None:
            return False
        return prompt.rfind(self.headers.starts[0]) > prompt.rfind(self.headers.end)

    def find_end(self, prompt: str) -> str:
        """Return the mark with which a rendered prompt ends, if it begins thoughts or an answer."""
        prompt = prompt.rstrip()
        starts = filter(prompt.endswith, (*self.thoughts, *self.answers))
        return max(starts, key=len, default="")

    def close_thoughts(self, prompt: str) -> str:
        """Return a prompt that does not end inside thoughts."""
        end = self.thoughts.get(self.find_end(prompt))
        return prompt if end is None else f"{prompt.rstrip()}\n{end}\n\n"

    def find_open(self, text: str) -> str:
        """Return the mark of the thoughts that are open at the end of an answer, or ""."""
        for start, end in self.thoughts.items():
            if 0 <= text.rfind(end) < text.rfind(start) or (start in text and end not in text):
                return start
        return ""

    def cut_thoughts(self, text: str) -> str:
        """Return the part of an earlier answer that follows its thoughts."""
        for end in self.thoughts.values():
            text = text.rpartition(end)[2]
        return text


PLAIN = ThoughtFormat()


def find_format(
    template: str, added: Iterable[str] = (), special: Iterable[str] = (), prompt: str = ""
) -> ThoughtFormat:
    """Return the marks of a model.

    Args:
        template: The source of its chat templates.
        added: The tokens that were added to its vocabulary.
        special: Those of them that are hidden unless they are marks.
        prompt: Text of an ordinary conversation, whose special tokens frame turns.
    """
    tokens = [token for token in _take(added) if len(token) <= _MAX_MARK]
    tags = {*_TAG.findall(template), *tokens}
    source = "\n".join((template, *tokens))
    thoughts = {
        start: end for start, end in _PAIRS if _contains(source, start) and _contains(source, end)
    }
    thoughts |= _pair_tags({tag for tag in tags if _NAME.search(tag)})
    answers = {start: end for start, end in _ANSWERS if _contains(source, start)}
    is_harmony = "<|channel|>" in source or "to=self" in source
    headers = HEADERS if is_harmony and "<|start|>" in source and HEADERS.end in source else None
    unopened = {end for start, end in thoughts.items() if end in template and start not in template}
    shown = {
        token
        for token in _take(special)
        if _TAG.fullmatch(token) and not _STRUCTURE.search(token) and token not in prompt
    }
    shown = set(sorted(shown)[:_MAX_SHOWN])
    return ThoughtFormat(thoughts, answers, headers, frozenset(unopened), frozenset(shown))


def has_thinking(template: str) -> bool:
    """Return True if a template has thoughts before an answer, or can turn them on."""
    return "enable_thinking" in template or find_format(template).has_thoughts


def _take(tokens: Iterable[str]) -> list[str]:
    return [token for token, _ in zip(tokens, range(_MAX_TOKENS), strict=False)]


def _contains(source: str, mark: str) -> bool:
    """Return True if a source has the tags of a mark, or its text if it has none."""
    return all(tag in source for tag in _TAG.findall(mark) or [mark])


def _pair_tags(tags: set[str]) -> dict[str, str]:
    """Return the tags after thoughts by those before. A tag with a slash implies the other one."""
    pairs = {}
    for tag in tags:
        if (start := re.sub(r"^(\W{1,2})/", r"\1", tag)) != tag:
            pairs[start] = tag
        if re.match(r"[<\[◁]\w", tag) and "|" not in tag:
            pairs[tag] = f"{tag[0]}/{tag[1:]}"
        for opening, closing in _OPPOSITES:
            if opening in tag and (end := tag.replace(opening, closing)) in tags:
                pairs[tag] = end
        name = tag.strip("<|>")
        for end in (f"<|end_{name}|>", f"<|end_of_{name}|>", f"<|{name}_end|>", f"<{name}|>"):
            if end in tags and end != tag and tag.startswith("<|"):
                pairs[tag] = end
    return pairs
