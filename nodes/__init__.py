"""The pack's ComfyUI nodes: one file each, adapters over ``host``."""

from .comfy import ComfyExtension, io
from .dit_sampler import CoreAIDiTSampler
from .rgba_decode import CoreAIRGBADecode
from .text_encode import CoreAITextEncode


class CoreAIRGBAExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [CoreAITextEncode, CoreAIDiTSampler, CoreAIRGBADecode]
