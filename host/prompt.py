"""Prompt to token ids: the chat template, the tokenizer, and where the prompt proper begins."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from .contract import DIT, TEXT_ENCODER, ContractError

SYSTEM_PART = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
USER_PART = "<|im_start|>user\n"
ASSISTANT_PART = "<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class PromptTokens:
    """Token ids ``[1, Lfull]`` int32 of the whole template, of which the DiT reads ``drop_idx`` on."""

    ids: np.ndarray
    drop_idx: int

    @property
    def text_length(self) -> int:
        """``L``, the number of text tokens the DiT reads."""
        return self.ids.shape[1] - self.drop_idx


def apply_template(prompt: str) -> str:
    """The text-to-image template around ``prompt``.

    Joined by concatenation: braces in a prompt are text. The empty prompt becomes one space, as
    the encoder has no BOS token and would have nothing to read.
    """
    return SYSTEM_PART + USER_PART + (prompt or " ") + ASSISTANT_PART


class PromptTokenizer:
    """A model set's tokenizer, bound to the template.

    Special tokens that a user types (``<|im_end|>``) are parsed as such, as the reference
    processor does.
    """

    def __init__(self, tokenizer: Tokenizer):
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._system_ids = self._encode(SYSTEM_PART)

    @classmethod
    def from_file(cls, path: str | Path) -> "PromptTokenizer":
        """Read a ``tokenizer.json``, or the one inside a folder.

        Raises ``ContractError`` when it is missing or is not a tokenizer.
        """
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise ContractError(f"no tokenizer at {path}: a model set needs tokenizer/tokenizer.json")
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # tokenizers raises plain Exception for anything wrong with the file
            raise ContractError(f"{path} is not a tokenizer ({error}): download or export it again") from error

    def encode(self, prompt: str) -> PromptTokens:
        """Tokenize ``prompt`` inside the template.

        Raises ``ContractError`` for a prompt that is not text, too long, or for a tokenizer that
        does not keep the system part apart from what follows it.
        """
        if not isinstance(prompt, str):
            raise ContractError(f"the prompt is a {type(prompt).__name__}: pass a string")
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ContractError(
                f"the prompt has the lone surrogate U+{ord(prompt[error.start]):04X} at character {error.start}, "
                "which is not text: remove it"
            ) from error
        ids = self._encode(apply_template(prompt))
        drop_idx = len(self._system_ids)
        if ids[:drop_idx] != self._system_ids:
            raise ContractError(
                "the tokenizer merges the end of the system part with what follows, so the prompt has no clear start: "
                "this tokenizer does not belong to this model"
            )
        self._check_length(len(ids), drop_idx)
        return PromptTokens(np.asarray([ids], dtype=np.int32), drop_idx)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _check_length(self, total: int, drop_idx: int) -> None:
        """Both axes: the encoder reads all tokens, the DiT those after the system part."""
        low, high = TEXT_ENCODER.limits["Lfull"]
        text_low, text_high = DIT.limits["L"]
        maximum = min(high, text_high + drop_idx)
        minimum = max(low, text_low + drop_idx)
        if total > maximum:
            raise ContractError(
                f"the prompt is {total} tokens long with its template, the limit is {maximum}: "
                f"cut {total - maximum} tokens, about {max(1, round((total - maximum) * 0.75))} English words"
            )
        if total < minimum:
            raise ContractError(f"the prompt is {total} tokens long with its template, the graphs need {minimum}")
