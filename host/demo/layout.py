"""Writing a checkpoint in the layout of ``Qwen/Qwen-Image-2.1``: what both small models share.

diffusers loads what is written here as it loads the published checkpoint. Needs diffusers and
transformers.
"""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage21, FlowMatchEulerDiscreteScheduler, QwenImage21Transformer2DModel
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from ..graphs.dit import DiTConfig
from ..graphs.text_encoder import TextEncoderConfig
from ..prompt import apply_template
from ..schedule import SchedulerConfig

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip

# How Qwen2's tokenizer splits text before the byte-level merges: contractions, words with at most
# one leading symbol, single digits, runs of symbols, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
)

MODEL_INDEX = {
    "_class_name": "QwenImage21Pipeline",
    "processor": ["transformers", "Qwen3VLProcessor"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
    "transformer": ["diffusers", "QwenImage21Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLQwenImage21"],
}


def build_tokenizer(texts: tuple[str, ...], vocabulary: int) -> Tokenizer:
    """A byte-level BPE built as Qwen2's is, with a vocabulary of hundreds instead of 151,643."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([apply_template(text) for text in texts], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def new_text_encoder(
    config: TextEncoderConfig, tokenizer: Tokenizer, mrope_section: tuple[int, int, int], *, tie_embeddings: bool
) -> Qwen3VLForConditionalGeneration:
    """A text stack of this size beside a vision tower of token size that text-to-image never calls."""
    text = {key: value for key, value in vars(config).items() if key != "rope_theta"}
    rope = {
        "rope_type": "default", "rope_theta": config.rope_theta,
        "mrope_interleaved": True, "mrope_section": list(mrope_section),
    }  # fmt: skip
    ids = {
        f"{name}_token_id": tokenizer.token_to_id(f"<|{token}|>")
        for name, token in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={**text, "max_position_embeddings": 1024, "rope_parameters": rope},
            vision_config={
                "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
                "out_hidden_size": config.hidden_size, "num_position_embeddings": 16, "deepstack_visual_indexes": [],
            },
            tie_word_embeddings=tie_embeddings,
            **ids,
        )
    )  # fmt: skip


def new_transformer(config: DiTConfig) -> QwenImage21Transformer2DModel:
    return QwenImage21Transformer2DModel(**vars(config))


def write_checkpoint(
    folder: Path,
    text_encoder: Qwen3VLForConditionalGeneration,
    transformer: QwenImage21Transformer2DModel,
    vae: AutoencoderKLQwenImage21,
    tokenizer: Tokenizer,
) -> None:
    """Write every part, the networks rounded to bf16 in place."""
    for name, network in (("text_encoder", text_encoder), ("transformer", transformer), ("vae", vae)):
        network.to(torch.bfloat16).save_pretrained(folder / name)
    schedule = SchedulerConfig()
    FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=schedule.base_image_seq_len,
        max_image_seq_len=schedule.max_image_seq_len,
        base_shift=schedule.base_shift,
        max_shift=schedule.max_shift,
        shift_terminal=schedule.shift_terminal,
        use_dynamic_shifting=True,
    ).save_pretrained(folder / "scheduler")
    _write_processor(folder / "processor", tokenizer)
    (folder / "model_index.json").write_text(json.dumps(MODEL_INDEX, indent=2), encoding="utf-8")


def _write_processor(folder: Path, tokenizer: Tokenizer) -> None:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
    )  # fmt: skip
    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16, merge_size=2),
        tokenizer=fast,
        video_processor=Qwen3VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
