"""The pack's ComfyUI nodes: one file each, adapters over ``host``."""

from .comfy import ComfyExtension, io
from .comfy_routes import add_routes
from .core_ai_empty_latent import CoreAIEmptyLatent
from .core_ai_model import CoreAIModel
from .core_ai_sigmas import CoreAISigmas
from .dit_sampler import CoreAIDiTSampler
from .rgba_decode import CoreAIRGBADecode
from .text_encode import CoreAITextEncode

add_routes()


class CoreAIRGBAExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            CoreAITextEncode,
            CoreAIDiTSampler,
            CoreAIRGBADecode,
            CoreAIModel,
            CoreAISigmas,
            CoreAIEmptyLatent,
        ]
