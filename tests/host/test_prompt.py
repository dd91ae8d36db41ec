"""Token ids, equal to those of the processor that the reference pipeline uses."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from coreai_rgba_image.host.contract import ContractError
from coreai_rgba_image.host.prompt import PromptTokenizer, apply_template

STICKER = (
    "This is an RGBA image with transparency. A cute cartoon dragon sticker. "
    "The image has alpha channel and the background is transparent."
)
PROMPTS = [
    "",
    " ",
    "a red apple on a wooden table, studio lighting",
    STICKER,
    "a {red} {0} apple, {{}} and {prompt!r} }{",
    "she said \"hi\", it's a 'test' `x` \\n \\",
    "line one\r\nline two\rline three\n\n\nline four\n",
    "\n\nstarts with line ends",
    "tabs\tand\t\ttabs, trailing space  ",
    "\u00a0no-break\u2003em\u200bzero-width\ufeff",
    "emoji 🍎🐉 👩‍👩‍👧‍👦 🏳️‍🌈",
    "一只红苹果，透明背景。りんご 사과",
    "combining: e\u0301 n\u0303 a\u030a\u0323 o\u0302\u0301",
    "\u0301 starts with a mark, ends with o\u0308",
    "العربية עברית ไทย हिन्दी",
    "numbers 0123456789 3.14 ①½²",
    "null \x00 and bell \x07",
    "typed <|im_end|> and <|im_start|>assistant\n",
    "<|im_end|>\n<|im_start|>system\nother<|im_end|>",
    "<|vision_start|><|image_pad|><|vision_end|> <|endoftext|>",
    "almost <|im_end| > <|IM_END|> <im_end>",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff",
]
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|vision_start|>",
    "<|vision_pad|>",
    "{}",
    "{0}",
    "\r\n",
    "\t",
]
TEXTS = st.lists(st.one_of(st.text(max_size=20), st.sampled_from(SPECIAL)), max_size=4).map("".join)


@pytest.fixture(scope="module")
def qwen_tokenizer(tmp_path_factory: pytest.TempPathFactory, comfyui_dir: Path) -> PromptTokenizer:
    """Qwen2's vocabulary of 151,643, which ComfyUI carries as vocab.json and merges.txt."""
    from transformers import Qwen2Tokenizer

    folder = tmp_path_factory.mktemp("qwen2")
    Qwen2Tokenizer.from_pretrained(comfyui_dir / "comfy" / "text_encoders" / "qwen25_tokenizer").save_pretrained(folder)
    return PromptTokenizer.from_file(folder)


def reference_tokens(pipeline: Any, prompt: str) -> tuple[list[list[int]], int]:
    """Ids and drop_idx as ``QwenImage21Pipeline`` finds them for one text-to-image prompt."""
    text = pipeline.prompt_template_t2i.format(prompt or " ")
    processed = pipeline.processor(text=[text], padding=True, padding_side="left", return_tensors="pt")
    return processed.input_ids.tolist(), pipeline._drop_idx


@pytest.mark.parametrize("prompt", PROMPTS)
def test_ids_and_drop_idx_equal_the_references(
    tiny_tokenizer: PromptTokenizer, reference_pipeline: Any, prompt: str
) -> None:
    tokens = tiny_tokenizer.encode(prompt)
    assert tokens.ids.dtype == np.int32
    assert (tokens.ids.tolist(), tokens.drop_idx) == reference_tokens(reference_pipeline, prompt)
    assert tokens.text_length == tokens.ids.shape[1] - tokens.drop_idx


@settings(deadline=None, max_examples=200)
@given(prompt=TEXTS)
def test_any_text_equals_the_references(tiny_tokenizer: PromptTokenizer, reference_pipeline: Any, prompt: str) -> None:
    tokens = tiny_tokenizer.encode(prompt)
    assert (tokens.ids.tolist(), tokens.drop_idx) == reference_tokens(reference_pipeline, prompt)


@given(TEXTS.filter(bool))
def test_the_template_is_concatenation(prompt: str) -> None:
    assert apply_template(prompt) == (
        "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
        "<|im_start|>user\n" + prompt + "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_template_equals_the_references(reference_pipeline: Any) -> None:
    assert apply_template("{x} %s") == reference_pipeline.prompt_template_t2i.format("{x} %s")


def test_an_empty_prompt_is_one_space(tiny_tokenizer: PromptTokenizer) -> None:
    assert apply_template("") == apply_template(" ") != apply_template("  ")
    assert np.array_equal(tiny_tokenizer.encode("").ids, tiny_tokenizer.encode(" ").ids)


def test_typed_special_tokens_are_parsed_as_such(tiny_tokenizer: PromptTokenizer, tiny_checkpoint: Path) -> None:
    end = Tokenizer.from_file(str(tiny_checkpoint / "processor" / "tokenizer.json")).token_to_id("<|im_end|>")
    count = [
        np.count_nonzero(tiny_tokenizer.encode(prompt).ids == end) for prompt in ("x", "x<|im_end|>", "x<|im_end>")
    ]
    assert count == [2, 3, 2]


def test_there_is_no_padding_truncation_or_bos(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Not even when the tokenizer's own file asks for them."""
    path = tiny_checkpoint / "processor" / "tokenizer.json"
    plain = PromptTokenizer.from_file(path).encode("hello")
    asking = Tokenizer.from_file(str(path))
    asking.enable_padding(length=100)
    asking.enable_truncation(12)
    asking.save(str(tmp_path / "tokenizer.json"))
    tokens = PromptTokenizer.from_file(tmp_path / "tokenizer.json").encode("hello")
    assert np.array_equal(tokens.ids, plain.ids)
    assert tokens.ids[0, 0] == asking.token_to_id("<|im_start|>")


def prompt_of(tokenizer: PromptTokenizer, total: int) -> str:
    """A prompt that is ``total`` tokens long in its template; a digit is always a token of its own."""
    return "7" * (1 + total - tokenizer.encode("7").ids.shape[1])


def test_the_longest_prompt_is_512_tokens(tiny_tokenizer: PromptTokenizer) -> None:
    tokens = tiny_tokenizer.encode(prompt_of(tiny_tokenizer, 512))
    assert tokens.ids.shape == (1, 512)
    assert tokens.text_length == 512 - tokens.drop_idx


@pytest.mark.parametrize(("total", "words"), [(513, 1), (612, 75), (5000, 3366)])
def test_a_longer_prompt_is_refused_with_count_limit_and_what_to_cut(
    tiny_tokenizer: PromptTokenizer, total: int, words: int
) -> None:
    message = (
        f"is {total} tokens long with its template, the limit is 512: cut {total - 512} tokens, about {words} English"
    )
    with pytest.raises(ContractError, match=message):
        tiny_tokenizer.encode(prompt_of(tiny_tokenizer, total))


def test_a_template_shorter_than_the_graphs_axes_is_refused() -> None:
    """With one token for each run between special tokens, the template has 10; the encoder needs 16."""
    from tokenizers import AddedToken, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("never", "isolated")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    with pytest.raises(ContractError, match="the prompt is 10 tokens long with its template, the graphs need 16"):
        PromptTokenizer(tokenizer).encode("x")


@pytest.mark.parametrize(
    ("prompt", "name", "position"),
    [("\ud83c", "U\\+D83C", 0), ("an apple \udf4e.", "U\\+DF4E", 9), ("🍎\ud800", "U\\+D800", 1)],
)
def test_a_lone_surrogate_is_refused(tiny_tokenizer: PromptTokenizer, prompt: str, name: str, position: int) -> None:
    with pytest.raises(ContractError, match=f"lone surrogate {name} at character {position}.*remove it"):
        tiny_tokenizer.encode(prompt)


@pytest.mark.parametrize("prompt", [None, 3, b"bytes", ["a", "list"]])
def test_something_that_is_no_text_is_refused(tiny_tokenizer: PromptTokenizer, prompt: Any) -> None:
    with pytest.raises(ContractError, match=f"the prompt is a {type(prompt).__name__}: pass a string"):
        tiny_tokenizer.encode(prompt)


def test_a_tokenizer_that_merges_across_the_system_part_is_refused() -> None:
    """One without the special tokens may merge the system part's last line end with what follows."""
    from tokenizers import models, pre_tokenizers

    characters = {character: index for index, character in enumerate(sorted(set(apply_template("x"))))}
    vocabulary = {**characters, "\n<": len(characters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("\n", "<")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("never", "isolated")
    with pytest.raises(ContractError, match="does not belong to this model"):
        PromptTokenizer(tokenizer).encode("x")


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=re.escape(f"no tokenizer at {tmp_path / 'tokenizer.json'}")):
        PromptTokenizer.from_file(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"', encoding="utf-8")
    with pytest.raises(ContractError, match=r"is not a tokenizer .*: download or export it again"):
        PromptTokenizer.from_file(tmp_path)


def test_the_system_part_has_the_contracts_14_ids(qwen_tokenizer: PromptTokenizer) -> None:
    tokens = qwen_tokenizer.encode("anything")
    assert tokens.drop_idx == 14
    assert tokens.ids[0, :14].tolist() == [
        151644, 8948, 198, 1092, 30782, 408, 323, 23643, 279, 3897, 9934, 13, 151645, 198,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "total"), [("a red apple on a wooden table, studio lighting", 32), ("", 23), (STICKER, 47)]
)
def test_the_published_prompts_have_their_published_lengths(
    qwen_tokenizer: PromptTokenizer, prompt: str, total: int
) -> None:
    tokens = qwen_tokenizer.encode(prompt)
    assert (tokens.ids.shape, tokens.text_length) == ((1, total), total - 14)
