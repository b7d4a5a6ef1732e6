"""Images from untrusted bytes to a model's pixels, and from pixels to a web page."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import interpolate

from everydepth.errors import DataError

Pixels = Float[Tensor, "channels height width"]
LARGEST_UPLOAD = 8 * 2**20  # bytes
MOST_PIXELS = 25_000_000
# No format that is a program (EPS, PDF), and none of the many obscure ones.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
BRIGHT = 0.5  # a border brighter than this is paper with dark ink


def decoded(content: bytes) -> Image.Image:
    """An image in one of the `FORMATS`, within limits; anything else is an error."""
    if len(content) > LARGEST_UPLOAD:
        raise DataError(
            f"the file has {len(content) / 2**20:.1f} MiB, but an upload may have at most "
            f"{LARGEST_UPLOAD // 2**20}; make it smaller"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # our limit is stricter than the one it warns about
            picture = Image.open(io.BytesIO(content), formats=FORMATS)
            width, height = picture.size
            if width * height > MOST_PIXELS:
                raise DataError(
                    f"the image has {width} x {height} pixels, but {MOST_PIXELS:,} is the limit; "
                    "make it smaller"
                )
            picture.load()
            return ImageOps.exif_transpose(picture)
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise DataError(
            f"the image claims far more pixels than the limit of {MOST_PIXELS:,}; make it smaller"
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise DataError(f"this is not a readable image; use one of {', '.join(FORMATS)}") from error


def from_data_url(url: str) -> Image.Image:
    """An image sent by a web page, from its canvas or from a file."""
    head, _, body = url.partition(",")
    if not head.startswith("data:image/") or len(body) > LARGEST_UPLOAD * 4 / 3 + 4:
        raise DataError(
            f"expected an image of at most {LARGEST_UPLOAD // 2**20} MiB, got {url[:40]!r}; use "
            f"one of {', '.join(FORMATS)}"
        )
    try:
        return decoded(base64.b64decode(body, validate=True))
    except binascii.Error as error:
        raise DataError(f"the image is corrupt ({error}); send it again") from error


def to_data_url(pixels: Pixels) -> str:
    """Pixels in 0..1 as a PNG for a web page."""
    values = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
    gray = values.shape[0] == 1
    picture = Image.fromarray(values[0] if gray else values.transpose(1, 2, 0))
    out = io.BytesIO()
    picture.save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def floats(pixels: Tensor) -> Tensor:
    """Pixels as floats in 0..1; floats are unchanged."""
    return pixels.float() if pixels.is_floating_point() else pixels.float() / 255


@dataclass(frozen=True, kw_only=True)
class Lens:
    """How a model expects images: size, channels, mean and standard deviation."""

    size: tuple[int, int]
    channels: int
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    @staticmethod
    def of(config: Any, preprocessing: Mapping[str, Any], *, like: Tensor | None = None) -> Lens:
        """From a model's config and its preprocessor_config.json.

        like: pixels whose size and channels are the default if the config has none.
        """
        channels, usual = (3, 224) if like is None else (like.shape[1], tuple(like.shape[-2:]))
        size = getattr(config, "image_size", None) or usual
        pair = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        mean, std = preprocessing.get("image_mean"), preprocessing.get("image_std")
        used = bool(mean and std) and preprocessing.get("do_normalize", True)
        return Lens(
            size=pair,
            channels=int(getattr(config, "num_channels", channels)),
            mean=mean if used else None,
            std=std if used else None,
        )

    def look(self, picture: Image.Image) -> Pixels:
        """An image as pixels in 0..1 of the model's size.

        A grayscale model is assumed to expect bright ink on a dark background, such as digits:
        bright paper is inverted, and the drawing is scaled to the frame.
        """
        if self.channels == 1:
            gray = np.asarray(_flat(picture).convert("L"), dtype=np.float32) / 255
            pixels = torch.from_numpy(_framed(gray))[None]
        else:
            whole = ImageOps.fit(_flat(picture), (self.size[1], self.size[0]))
            values = np.asarray(whole, dtype=np.float32) / 255
            pixels = torch.from_numpy(values).permute(2, 0, 1)
        return self.resized(pixels[None])[0].clamp(0, 1)

    def resized(self, pixels: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c2 h2 w2"]:
        """Pixels with the model's size and channels."""
        if pixels.shape[1] == 1 and self.channels == 3:
            pixels = pixels.expand(-1, 3, -1, -1)
        if tuple(pixels.shape[-2:]) != self.size:
            pixels = interpolate(pixels, self.size, mode="bilinear", antialias=True)
        return pixels

    def normalized(self, pixels: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        if self.mean is None or self.std is None:
            return pixels
        center, scale = (pixels.new_tensor(v).view(1, -1, 1, 1) for v in (self.mean, self.std))
        return (pixels - center) / scale


def _flat(picture: Image.Image) -> Image.Image:
    """Without transparency: transparent parts become black."""
    whole = picture.convert("RGBA")
    ground = Image.new("RGBA", whole.size, "black")
    return Image.alpha_composite(ground, whole).convert("RGB")


def _framed(gray: np.ndarray) -> np.ndarray:
    """Bright ink on black, cropped to the ink and padded to a square; unchanged without ink."""
    border = np.concatenate([gray[0], gray[-1], gray[:, 0], gray[:, -1]])
    if float(np.median(border)) > BRIGHT:
        gray = 1 - gray
    rows, columns = (np.flatnonzero((gray > 0.2).any(axis)) for axis in (1, 0))
    if not rows.size:
        return gray
    ink = gray[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    side = max(ink.shape)
    spare = [side - length for length in ink.shape]
    return np.pad(ink, [(s // 2, s - s // 2) for s in spare])
