"""Images of requests: what the engine decides about them at its start, and the items that prompts get."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from jaxserve.config import EngineConfig
from jaxserve.engine.model_files import ModelFiles
from jaxserve.errors import ConfigError, InvalidRequestError, MissingPackageError, TokenizerError, shorten
from jaxserve.media.decode import ImageLimits, require_pillow
from jaxserve.media.items import MediaItem, PromptImages
from jaxserve.media.loader import Admit, ImageLoader
from jaxserve.media.options import ImageOptions
from jaxserve.media.parts import ImagePart
from jaxserve.media.processors import ImageProcessor, read_processor
from jaxserve.media.processors.qwen3_vl import Qwen3VLShape
from jaxserve.media.processors.settings import read_settings
from jaxserve.media.prompt import ImageTokens, locate_images
from jaxserve.media.reader import MAX_PROCESSES, ImageReader
from jaxserve.media.sources import MediaSources, SourceOptions

if TYPE_CHECKING:
    from jaxserve.core.models.base import DecoderConfig
    from jaxserve.core.models.tower import Tower

_log = logging.getLogger(__name__)
_MOST_PATCHES = 16_384  # of a step, unless an option says how many: 4,096 tokens of Qwen3-VL
_TIME_LIMIT_S = 20.0  # for one image; the largest that is read takes seconds on a busy machine
SERVE_TEXT = 'limit_mm_per_prompt={"image": 0} serves the model for text'
_LIMITS = ImageLimits()
_KINDS = ("image",)  # of vLLM's `multi_modal_data`


def choose_images(
    config: EngineConfig, files: ModelFiles, model: DecoderConfig, towers: Mapping[str, Tower]
) -> ImageOptions | None:
    """Returns how an engine reads images; None if the model is served for text.

    It is where it has no tower, makes vectors of texts, or comes without the tower's weights (a preset, GGUF, orbax),
    where options say so, and, with a warning, where Pillow or the processor's settings are missing.

    Args:
        model: with its final `max_model_len`.
        towers: by family.

    Raises:
        ConfigError: an option is for images and there are none; the processor's settings are not supported;
            options do not fit them or each other; or a domain or the folder that they allow is none.
    """
    media, tower, folder = config.media, towers.get(model.family), files.path
    if tower is None or not isinstance(files.hf_config.get("vision_config"), Mapping) or not model.generates:
        media.refuse("this model reads no images")
        return None
    if folder is None or not folder.is_dir() or _is_orbax(folder, config.model.load_format):
        media.refuse("images are read by checkpoints in safetensors, which have the tower")
        return None
    if not media.num_images:
        return None
    if config.scheduler.deterministic:
        message = f"is not supported beside images; {SERVE_TEXT}"
        raise ConfigError(message, field="deterministic", value=True)
    settings, lack = read_settings(folder), _find_lack()
    if settings is None or lack is not None:
        lack = lack or "there is no preprocessor_config.json, which says how"
        media.refuse(lack)
        _log.warning("the model is served for text, though it reads images: %s", lack)
        return None
    _make_sources(config)  # it opens nothing, and what is wrong is said before weights are read
    processor = read_processor(tower.processor, settings)
    try:
        if media.mm_processor_kwargs is not None:
            processor = processor.enlarge().with_options(media.mm_processor_kwargs)
    except InvalidRequestError as error:
        raise ConfigError(str(error).removeprefix(f"{error.field}: "), field=error.field, value=error.value) from error
    processor, max_patches = _limit_patches(processor, media.max_num_batched_patches, model.max_model_len)
    shape = processor.shape
    merge_size = shape.merge_size if isinstance(shape, Qwen3VLShape) else None
    tokens = _read_tokens(config, folder, tower.tokens(files.hf_config))
    return ImageOptions(processor, tokens, max_patches, media.num_images, merge_size)


def _find_lack() -> str | None:
    """Returns the reason why no image can be read here."""
    try:
        require_pillow()
    except MissingPackageError as error:
        return str(error)
    return None


def _read_tokens(config: EngineConfig, folder: Path, tokens: ImageTokens) -> ImageTokens:
    """Returns the tokens of images; the tokenizer is read where it alone knows the ids of some."""
    from jaxserve.tokenizers import load_tokenizer

    if tokens.row_end is None:
        return tokens
    try:
        return tokens.find_ids(load_tokenizer(config.model.tokenizer or folder).special_tokens)
    except TokenizerError as error:
        message = f"the ends of an image's rows are tokens whose ids it has: {error}; {SERVE_TEXT}"
        raise ConfigError(message, field="tokenizer", value=config.model.tokenizer) from error


def _make_sources(config: EngineConfig) -> MediaSources:
    """Returns the sources that options allow; ConfigError where a domain or the folder is none."""
    media = config.media
    return MediaSources(SourceOptions(media.allowed_media_domains, media.allowed_local_media_path), _LIMITS)


def _is_orbax(folder: Path, load_format: str) -> bool:
    from jaxserve.core.weights import checkpoint_format

    return load_format == "orbax" or (load_format == "auto" and checkpoint_format(folder) == "orbax")


def _limit_patches(processor: ImageProcessor, given: int | None, max_model_len: int) -> tuple[ImageProcessor, int]:
    """Returns the processor, whose images fit a step and the context, and the patches of a step."""
    shape = processor.shape
    least, per_token = shape.least_patches, shape.most_patches // shape.most_tokens
    if given is not None and given < least:
        message = f"must be at least {least}, the least patches of this model's largest images, got {given}"
        raise ConfigError(message, field="max_num_batched_patches", value=given)
    room = max_model_len * 3 // 4  # an image leaves a quarter of the context to text
    if room * per_token < least:
        message = (
            f"an image of this model takes at least {least // per_token} tokens, and {max_model_len} have room for "
            f"{room} of them; raise it, or {SERVE_TEXT}"
        )
        raise ConfigError(message, field="max_model_len", value=max_model_len)
    most = max(least, _MOST_PATCHES) if given is None else given
    shape = shape.limit_patches(min(shape.most_patches, most, room * per_token))
    return replace(processor, shape=shape), shape.most_patches if given is None else given


def describe_images(options: ImageOptions) -> str:
    """Returns a line about what images cost at most."""
    shape, tokens = options.processor.shape, options.tokens
    ends = "" if tokens.row_end is None else " beside those at the ends of rows"
    return (
        f"images: at most {shape.most_tokens:,} tokens{ends} and {shape.most_patches:,} patches each, "
        f"{options.max_patches:,} patches a step, {options.num_images:,} images a request (limit_mm_per_prompt)"
    )


@final
class ImageInput:
    """Reads the images of requests. Safe to use from several threads."""

    def __init__(self, options: ImageOptions, config: EngineConfig, max_model_len: int) -> None:
        """Starts nothing."""
        self.options = options
        self._max_model_len = max_model_len
        self._limits, self._sources = _LIMITS, _make_sources(config)
        self._reader = ImageReader(self._limits, time_limit_s=_TIME_LIMIT_S)

    def start(self) -> None:
        """Starts one process that decodes images; WorkerStartError if it cannot be started."""
        self._reader.start()

    def close(self) -> None:
        """Ends the processes. A second call does nothing."""
        self._reader.close()

    def make_loader(self) -> ImageLoader:
        """Returns what loads images on one event loop."""
        processor = self.options.processor
        return ImageLoader(self._sources, self._reader.read, processor, self._limits, num_threads=MAX_PROCESSES)

    def load(self, parts: Sequence[ImagePart], options: Mapping[str, Any] | None = None) -> list[MediaItem]:
        """Returns the items of a request's images; arguments and errors are those of `ImageLoader.load`.

        The event loop for it has a thread of its own, since the caller's thread may run another.
        """

        async def load() -> list[MediaItem]:
            loader = self.make_loader()
            try:
                return await loader.load(parts, options, admit=self.limit_tokens())
            finally:
                loader.close()

        if not parts:
            self.check_options(options)
            return []
        with ThreadPoolExecutor(1, "jaxserve-load-images") as thread:
            return thread.submit(asyncio.run, load()).result()

    def check_options(self, options: Mapping[str, Any] | None) -> None:
        """Raises InvalidRequestError for a request's `mm_processor_kwargs` that are unknown or out of range."""
        self.options.processor.with_options(options or {})

    def limit_tokens(self, also: Callable[[MediaItem], None] = lambda item: None) -> Admit:
        """Returns a function that refuses images when those of a request so far fill the model's context.

        `also` is called with each item before.
        """
        count = 0

        def admit(item: MediaItem) -> None:
            nonlocal count
            also(item)
            count += self.options.tokens.count(item)
            if count >= self._max_model_len:
                message = (
                    f"This model's maximum context length is {self._max_model_len} tokens, and the images have "
                    f"{count} or more; send fewer or smaller ones"
                )
                raise InvalidRequestError(message, field="messages", value=count)

        return admit

    def locate(self, ids: Sequence[int], items: Sequence[MediaItem]) -> tuple[list[int], PromptImages | None]:
        """Returns a prompt's ids with all placeholders, and its images in their places.

        Raises:
            InvalidRequestError: there are not as many placeholders as images.
        """
        options = self.options
        assert all(item.num_patches <= options.max_patches for item in items), "the processor is limited to them"
        return locate_images(ids, items, options.tokens, options.merge_size)

    def write(self, text: str, num_images: int) -> str:
        """Returns the text of a prompt that has one mark for each image, with one placeholder for each.

        Raises:
            InvalidRequestError: it has another number of marks.
        """
        mark = self.options.tokens.mark
        if (count := text.count(mark)) != num_images:
            message = f"has {count} marks {mark!r} for {num_images} images; write one where each image belongs"
            raise InvalidRequestError(message, field="prompt", value=count)
        return self.options.tokens.write(text, num_images)


def list_images(data: object, most: int) -> list[ImagePart]:
    """Returns the images of a prompt's `multi_modal_data`: an image of Pillow, or a list of them, under "image".

    Raises:
        InvalidRequestError: there is anything else, or more than `most`.
    """
    field = "multi_modal_data"
    if not isinstance(data, Mapping) or data.keys() - set(_KINDS):
        message = f"must be a mapping with images of Pillow under 'image', got {shorten(data)}"
        raise InvalidRequestError(message, field=field)
    given = data.get("image", [])
    images = list(given) if isinstance(given, list | tuple) else [given]
    if len(images) > most:
        message = f"has {len(images)} images; a request may have {most} (limit_mm_per_prompt)"
        raise InvalidRequestError(message, field=f"{field}.image", value=len(images))
    for at, image in enumerate(images):
        if not (hasattr(image, "convert") and hasattr(image, "getbands")):  # Pillow's, which may not be installed
            message = f"must be an image of Pillow, got {shorten(image)}; messages of chat also take URLs"
            raise InvalidRequestError(message, field=f"{field}.image[{at}]")
    return [ImagePart(f"{field}.image[{at}]", None, image) for at, image in enumerate(images)]
