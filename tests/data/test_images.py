"""Image files: the same pixels from every form of them, and the size that they are looked at in."""

import io
import json

import pytest
import torch
from PIL import Image, ImageOps
from tiny_models import tiny_vision_model
from transformers import (
    CLIPImageProcessorPil,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaOnevisionImageProcessorPil,
    PixtralImageProcessorPil,
    Qwen2VLImageProcessorPil,
)

from shardwise.config import DataError, ModelError
from shardwise.data import ImageReader
from shardwise.data.image_processors import GridProcessor, image_processor_for
from shardwise.families import (
    GridTower,
    Idefics3Tower,
    InternVLTower,
    LlavaNextTower,
    LlavaOnevisionTower,
    LlavaTower,
    PixtralTower,
)


@pytest.fixture
def reader():
    processor = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})
    tower = GridTower(merge_size=2, num_values=96)
    return ImageReader(GridProcessor(processor, tower))


@pytest.fixture
def model_folder(tmp_path):
    """Without an image processor."""
    tiny_vision_model("qwen3_vl").config.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def picture():
    def make(number: int = 0, size=(16, 8)):
        return Image.new("RGB", size, (number * 20 % 256, 90, 200))

    return make


def encoded(image, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_paths_bytes_and_pil_images_give_the_same_pixels(reader, picture, tmp_path):
    image = picture(3)
    image.save(tmp_path / "a.png")
    data = encoded(image)
    cells = ["a.png", str(tmp_path / "a.png"), data, {"bytes": data, "path": None}, {"bytes": None, "path": "a.png"}]
    found = [reader.read([reader.open(cell, tmp_path, "x")]) for cell in [*cells, image]]
    assert all(torch.equal(one.pixel_values, found[0].pixel_values) for one in found)


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK"])
def test_other_modes_become_rgb(reader, mode, tmp_path):
    image = Image.linear_gradient("L").resize((16, 8)).convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    (found,) = (reader.read([reader.open(encoded(image, kind), tmp_path, "x")]) for _ in range(1))
    expected = reader.read([reader.open(Image.open(io.BytesIO(encoded(image, kind))).convert("RGB"), tmp_path, "x")])
    assert torch.equal(found.pixel_values, expected.pixel_values)


@pytest.mark.parametrize("mode", ["I", "I;16", "I;16B", "F"])
def test_images_in_memory_with_more_than_8_bits_are_refused_like_files(reader, mode, tmp_path):
    with pytest.raises(DataError, match=rf"^row 3 has the mode {mode}, more than 8 bits a channel"):
        reader.open(Image.new(mode, (16, 8)), tmp_path, "row 3")


def test_an_image_in_memory_is_turned_as_its_file_is(reader, tmp_path):
    exif = Image.Exif()
    exif[274] = 6  # lies on its side
    data = encoded(Image.linear_gradient("L").resize((32, 16)).convert("RGB"), "JPEG", exif=exif)
    from_bytes, from_memory = reader.open(data, tmp_path, "x"), reader.open(Image.open(io.BytesIO(data)), tmp_path, "x")
    assert from_bytes.size == from_memory.size
    assert torch.equal(reader.read([from_bytes]).pixel_values, reader.read([from_memory]).pixel_values)


@pytest.mark.parametrize(
    "of", [Image.Image.copy, lambda image: image.convert("L"), lambda image: image.resize((32, 16))]
)
def test_what_is_made_of_a_photograph_in_memory_is_turned_too(reader, tmp_path, of):
    exif = Image.Exif()
    exif[274] = 6
    data = encoded(Image.linear_gradient("L").resize((32, 16)).convert("RGB"), "JPEG", exif=exif)
    own = of(Image.open(io.BytesIO(data)))
    assert own.format is None
    found, expected = (reader.open(image, tmp_path, "x") for image in (own, ImageOps.exif_transpose(own)))
    assert found.size == expected.size == [1, 8, 4]
    assert torch.equal(reader.read([found]).pixel_values, reader.read([expected]).pixel_values)


@pytest.mark.parametrize("is_behind", [False, True], ids=["before the pixels", "behind the pixels"])
def test_a_png_is_turned_if_that_is_known_before_it_is_decoded(reader, tmp_path, is_behind):
    exif = Image.Exif()
    exif[274] = 6
    data = encoded(Image.linear_gradient("L").resize((32, 16)).convert("RGB"), exif=exif)
    if is_behind:
        start = data.index(b"eXIf") - 4
        chunk = data[start : start + 12 + int.from_bytes(data[start : start + 4], "big")]
        end = data.index(b"IEND") - 4
        data = data[:start] + data[start + len(chunk) : end] + chunk + data[end:]
        assert Image.open(io.BytesIO(data)).getexif()[274] == 6
    found = reader.open(data, tmp_path, "x")
    assert found.size == ([1, 4, 8] if is_behind else [1, 8, 4])
    assert reader.read([found]).sizes.tolist() == [found.size]


def test_what_is_transparent_is_white(reader, tmp_path):
    clear, white = Image.new("RGBA", (16, 8), (255, 0, 0, 0)), Image.new("RGB", (16, 8), "white")
    palette = Image.new("P", (16, 8), 0)
    palette.putpalette([255, 0, 0])
    clear_palette = encoded(palette, transparency=0)
    expected = reader.read([reader.open(white, tmp_path, "x")])
    for image in (encoded(clear), clear_palette):
        found = reader.read([reader.open(image, tmp_path, "x")])
        assert torch.equal(found.pixel_values, expected.pixel_values)


@pytest.mark.parametrize("mode", ["LA", "La", "PA", "RGBA", "RGBa"])
def test_what_is_transparent_in_memory_is_white_in_every_mode(reader, mode, tmp_path):
    """And what is not keeps its colour: half of the image is black."""
    black = Image.new("L", (16, 8), 0)
    alpha = Image.new("L", (16, 8), 0)
    alpha.paste(255, (0, 0, 8, 8))
    image = Image.merge("LA", (black, alpha))
    if mode.startswith("RGB"):
        image = image.convert("RGBA")
    if mode == "PA":
        image = Image.merge("RGBA", (black, black, black, alpha)).quantize().convert("PA")
        assert image.getpixel((15, 0))[1] == 0
    image = image if image.mode == mode else image.convert(mode)
    expected = Image.new("RGB", (16, 8), "white")
    expected.paste("black", (0, 0, 8, 8))
    found, wanted = (reader.read([reader.open(one, tmp_path, "x")]).pixel_values for one in (image, expected))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"])
def test_every_other_mode_of_images_in_memory_is_that_of_pillow_in_rgb(reader, mode, tmp_path):
    image = Image.linear_gradient("L").resize((16, 8)).convert("RGB")
    if mode == "LAB":
        image = Image.merge("LAB", image.split())
    image = image if image.mode == mode else image.convert(mode)
    found, wanted = (reader.read([reader.open(one, tmp_path, "x")]) for one in (image, image.convert("RGB")))
    assert torch.equal(found.pixel_values, wanted.pixel_values)


def test_an_image_in_memory_that_breaks_off_is_told_when_its_row_is_read(reader, tmp_path):
    """PIL opens a file by its beginning, and reads the rest once it is asked for pixels."""
    half = encoded(Image.effect_noise((64, 64), 90).convert("RGB"))[:1500]
    with pytest.raises(DataError, match=r"^row 3 is damaged: .*; replace it or remove the row$"):
        reader.open(Image.open(io.BytesIO(half)), tmp_path, "row 3")


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_an_image_without_pixels_is_refused(reader, size, tmp_path):
    with pytest.raises(DataError, match=rf"^row 3 has {size[0]} x {size[1]} pixels, and nothing to see; replace it"):
        reader.open(Image.new("RGB", size), tmp_path, "row 3")


SQUARE = {"height": 16, "width": 16}
TILE = {"num_channels": 3, "height": 16, "width": 16, "tokens_per_tile": 4}
OTHER_KINDS = {
    "pixtral": (
        PixtralTower(patch_size=4, merge_size=2, num_channels=3, min_tokens=2),
        PixtralImageProcessorPil(patch_size={"height": 4, "width": 4}, size={"longest_edge": 400}),
    ),
    "llava_onevision": (
        LlavaOnevisionTower(tiles=LlavaTower(**TILE), pinpoints=[(16, 32), (32, 16)], max_tiles=1),
        LlavaOnevisionImageProcessorPil(size=SQUARE, image_grid_pinpoints=[[16, 32], [32, 16]]),
    ),
    "idefics3": (
        Idefics3Tower(**TILE),
        Idefics3ImageProcessorPil(size={"longest_edge": 400}, max_image_size={"longest_edge": 16}),
    ),
    "internvl": (InternVLTower(**TILE), GotOcr2ImageProcessorPil(size=SQUARE)),
    "llava": (LlavaTower(**TILE), CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=SQUARE)),
    "llava_next": (
        LlavaNextTower(tiles=LlavaTower(**TILE), pinpoints=[(16, 32), (32, 16)]),
        LlavaNextImageProcessorPil(
            size={"shortest_edge": 16}, crop_size=SQUARE, image_grid_pinpoints=[[16, 32], [32, 16]]
        ),
    ),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_the_narrowest_images_are_read_and_narrower_ones_refused(kind, picture, tmp_path):
    tower, processor = OTHER_KINDS[kind]
    reader = ImageReader(image_processor_for(tower, processor))
    for size in ((1, 200), (400, 2)):
        found = reader.open(picture(0, size), tmp_path, "x")
        assert len(reader.read([found]).pixel_values) == found.num_patches > 0
    for size in ((1, 201), (10000, 2)):
        narrow = rf"^x has {size[0]} x {size[1]} pixels, sides of more than the 1 to 200 that are read; crop it"
        for cell in (picture(0, size), encoded(picture(0, size))):
            with pytest.raises(DataError, match=narrow):
                reader.open(cell, tmp_path, "x")


def test_an_image_that_is_scaled_down_to_nothing_is_refused(picture, tmp_path):
    tower = PixtralTower(patch_size=4, merge_size=2, num_channels=3, min_tokens=2)
    processor = PixtralImageProcessorPil(patch_size={"height": 4, "width": 4}, size={"longest_edge": 64})
    reader = ImageReader(image_processor_for(tower, processor))
    with pytest.raises(
        DataError, match=r"^x has 100 x 1 pixels, of which the image processor makes 0 x 64: nothing to"
    ):
        reader.open(picture(0, (100, 1)), tmp_path, "x")


def test_a_photograph_is_turned_as_its_camera_says(reader, picture, tmp_path):
    orientation = Image.Exif()
    orientation[0x0112] = 6
    turned = reader.open(encoded(picture(0, (16, 24)), "JPEG", exif=orientation.tobytes()), tmp_path, "x")
    assert turned.size == [1, 4, 6]
    assert reader.read([turned]).sizes.tolist() == [[1, 4, 6]]


@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation_is_the_one_of_pillow(reader, orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    photograph = Image.radial_gradient("L").crop((0, 0, 24, 16)).convert("RGB")
    data = encoded(photograph, "WEBP", exif=exif.tobytes(), lossless=True)
    expected = reader.open(ImageOps.exif_transpose(Image.open(io.BytesIO(data))), tmp_path, "x")
    found = reader.open(data, tmp_path, "x")
    assert found.size == expected.size
    assert torch.equal(reader.read([found]).pixel_values, reader.read([expected]).pixel_values)


def test_damaged_exif_data_are_told_before_training(reader, picture, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(picture(), "WEBP", exif=exif.tobytes())
    with pytest.raises(DataError, match=r"^row 3: its EXIF data are damaged \(not a TIFF file"):
        reader.open(data.replace(b"MM\0*", b"MM\0-"), tmp_path, "row 3")


def test_exif_data_that_cannot_be_written_again_do_not_matter(reader, picture, tmp_path):
    exif = Image.Exif()
    exif[0x0112], exif[0x011A] = 6, 72.0
    data = exif.tobytes().replace(b"\x01\x1a\0\x05", b"\x01\x1a\0\x02")  # the resolution is said to be a text
    found = reader.open(encoded(picture(0, (16, 24)), "WEBP", exif=data), tmp_path, "x")
    assert reader.read([found]).sizes.tolist() == [[1, 4, 6]]


def test_a_large_image_is_scaled_down_as_the_processor_does(reader, picture, tmp_path):
    found = reader.open(encoded(picture(0, (64, 48))), tmp_path, "x")
    assert found.size == [1, 6, 8]  # 768 of 3,072 pixels: at most 1,024, in multiples of 8
    assert found.num_tokens == 12
    assert reader.read([found]).pixel_values.shape == (48, 96)


def test_a_file_that_has_changed_since_is_named(reader, picture, tmp_path):
    picture().save(tmp_path / "a.png")
    found = reader.open("a.png", tmp_path, "line 3: image 1")
    picture(0, (24, 24)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"^line 3: image 1 \(a\.png\) has another size than when the rows were read"):
        reader.read([found])
    picture(0, (1000, 1)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"^line 3: image 1 \(a\.png\) has 1000 x 1 pixels, sides of more than"):
        reader.read([found])
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"^line 3: image 1 \(a\.png\): there is no file"):
        reader.read([found])


def test_several_are_read_in_their_order(reader, tmp_path):
    pictures = [reader.open(Image.new("RGB", (8 * n, 8), (25 * n, 0, 0)), tmp_path, str(n)) for n in range(1, 9)]
    together = reader.read(pictures)
    alone = [reader.read([one]) for one in pictures]
    assert torch.equal(together.pixel_values, torch.cat([one.pixel_values for one in alone]))
    assert together.sizes.tolist() == [one.size for one in pictures]


def test_only_a_processor_for_the_tower_of_the_model_is_taken(model_folder):
    assert ImageReader.load(model_folder) is None
    CLIPImageProcessorPil().save_pretrained(model_folder)
    path = rf"^{model_folder}/preprocessor_config\.json: "
    with pytest.raises(ModelError, match=path + r"the image processor is CLIPImageProcessorPil, and .* by Qwen2VLIma"):
        ImageReader.load(model_folder)
    Qwen2VLImageProcessorPil(do_resize=False).save_pretrained(model_folder)
    with pytest.raises(ModelError, match=path + r"do_resize=false is not supported"):
        ImageReader.load(model_folder)
    Qwen2VLImageProcessorPil().save_pretrained(model_folder)
    assert ImageReader.load(model_folder) is not None


def test_a_processor_that_cannot_be_used_stops_who_reads_an_image(reader, picture, model_folder):
    one = reader.open(picture(), model_folder, "row 1: image 1")
    assert ImageReader.load_unless_unusable(model_folder) is None
    CLIPImageProcessorPil().save_pretrained(model_folder)
    unusable = ImageReader.load_unless_unusable(model_folder)
    reason = rf"^row 1: image 1: {model_folder}/preprocessor_config\.json: the image processor is CLIPImageProcessorPil"
    with pytest.raises(DataError, match=reason):
        unusable.open(picture(), model_folder, "row 1: image 1")
    with pytest.raises(DataError, match=reason):
        unusable.read([one])
    path = model_folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_processor_type": "Other"}))
    with pytest.raises(DataError, match="the image processor cannot be loaded"):
        ImageReader.load_unless_unusable(model_folder).read([one])


def test_a_processor_is_read_where_transformers_5_writes_it(reader, picture, model_folder):
    """Beside that of text and videos, in one file."""
    tree = {"image_processor": reader._processor._processor.to_dict(), "processor_class": "Qwen2VLProcessor"}
    (model_folder / "processor_config.json").write_text(json.dumps(tree))
    found = ImageReader.load(model_folder)
    one = [picture(3, (24, 16))]
    assert torch.equal(
        *(r.read([r.open(image, model_folder, "it") for image in one]).pixel_values for r in (found, reader))
    )


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
@pytest.mark.parametrize(
    ("text", "reason"), [("{", "Expecting property name"), ("[]", "it holds a list instead of keys")]
)
def test_a_damaged_file_of_a_processor_is_named(tmp_path, name, text, reason):
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=rf"^{tmp_path / name} cannot be read: {reason}.*; download or copy it again$"):
        ImageReader.load(tmp_path)
