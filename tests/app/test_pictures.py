"""Uploads: only pictures, only of a reasonable size, seen as the model was trained to see them."""

from __future__ import annotations

import base64
import io
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from everydepth.data.pictures import (
    LARGEST_UPLOAD,
    Lens,
    decoded,
    from_data_url,
    to_data_url,
)
from everydepth.errors import DataError

LENS = Lens(size=(8, 8), channels=1)


def packed(picture: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    picture.save(out, kind)
    return out.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be large."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = zlib.crc32(kind + body).to_bytes(4, "big")
        return len(body).to_bytes(4, "big") + kind + body + check

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"x") + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_the_usual_formats_are_read(kind: str) -> None:
    assert decoded(packed(Image.new("RGB", (5, 4), "red"), kind)).size == (5, 4)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"<svg xmlns='http://www.w3.org/2000/svg'><script>1</script></svg>",
        b"\x80\x04cos\nsystem\n.",
        packed(Image.new("RGB", (5, 4)))[:40],
        packed(Image.new("RGB", (5, 4)), "TIFF"),
        packed(Image.new("RGB", (5, 4)), "PDF"),
    ],
    ids=["empty", "text", "postscript", "svg", "pickle", "torn", "tiff", "pdf"],
)
def test_anything_else_is_refused(content: bytes) -> None:
    with pytest.raises(DataError, match="not a readable image; use one of PNG, JPEG"):
        decoded(content)


def test_a_small_file_that_unpacks_to_a_huge_picture_is_refused_before_it_is_unpacked() -> None:
    with pytest.raises(DataError, match="6000 x 6000 pixels, but 25,000,000 is the limit"):
        decoded(bomb(6000, 6000))
    with pytest.raises(DataError, match="far more pixels than the limit of 25,000,000"):
        decoded(bomb(30000, 30000))


def test_a_large_file_is_refused() -> None:
    with pytest.raises(DataError, match=r"has 8\.0 MiB, but an upload may have at most 8"):
        decoded(b"x" * (LARGEST_UPLOAD + 1))


@pytest.mark.parametrize(
    "url", ["", "data:text/html,<script>", "http://example.org/x.png", "data:image/png;base64,%%%"]
)
def test_what_a_page_does_not_send_is_refused(url: str) -> None:
    with pytest.raises(DataError, match=r"expected an image of at most 8 MiB|is corrupt .*again"):
        from_data_url(url)


def test_pixels_survive_the_way_into_a_page_and_back() -> None:
    pixels = torch.arange(64).float().view(1, 8, 8) / 255
    seen = np.asarray(from_data_url(to_data_url(pixels)))
    assert np.array_equal(seen, np.arange(64).reshape(8, 8))
    color = torch.rand(3, 4, 6)
    assert from_data_url(to_data_url(color)).size == (6, 4)


def ink(paper: int, pen: int) -> Image.Image:
    """A bar twice as high as wide in a corner of a page."""
    page = np.full((100, 120), paper, np.uint8)
    page[10:50, 70:90] = pen
    return Image.fromarray(page)


def test_ink_fills_the_frame_and_is_bright_whatever_the_paper() -> None:
    dark, bright = LENS.look(ink(0, 255)), LENS.look(ink(255, 0))
    assert torch.allclose(dark, bright)
    assert dark.shape == (1, 8, 8)
    # The bar fills the height and, being half as wide as high, the middle half of the width.
    assert dark[0, :, 3:5].min() > 0.95
    assert dark[0, :, [0, 7]].max() < 0.05


def test_an_empty_page_stays_empty() -> None:
    assert LENS.look(Image.new("L", (30, 20))).max() == 0
    assert LENS.look(Image.new("L", (30, 20), "white")).max() == 0


def test_a_color_model_gets_colors_and_what_is_see_through_is_black() -> None:
    lens = Lens(size=(6, 6), channels=3)
    seen = lens.look(Image.new("RGBA", (12, 12), (255, 0, 0, 255)))
    assert torch.allclose(seen.mean((1, 2)), torch.tensor([1.0, 0, 0]))
    assert lens.look(Image.new("RGBA", (12, 12), (255, 0, 0, 0))).max() == 0
    assert lens.resized(torch.rand(1, 1, 6, 6)).shape == (1, 3, 6, 6)


def test_a_lens_normalizes_as_the_model_says() -> None:
    class Config:
        image_size = 4
        num_channels = 1

    settings: dict[str, Any] = {"image_mean": [0.5], "image_std": [0.25]}
    lens = Lens.of(Config(), settings)
    assert lens.size == (4, 4)
    assert lens.normalized(torch.ones(1, 1, 4, 4)).unique().tolist() == [2.0]
    off = Lens.of(Config(), settings | {"do_normalize": False})
    assert off.normalized(torch.ones(1, 1, 4, 4)).unique().tolist() == [1.0]


def test_a_data_url_is_a_png() -> None:
    head, _, body = to_data_url(torch.zeros(1, 2, 2)).partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(body).startswith(b"\x89PNG")
