"""Images and data sets: every kind of file, every layout of folders, and what is wrong with them."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from spotlights.runtime.errors import UserError
from spotlights.wbmm.recipes import data as recipes_data
from spotlights.wbmm.recipes.augment import PROFILES, Augmentation, random_affine, training_transform
from spotlights.wbmm.recipes.data import FileImages, ImageData, TensorImages, adapt, load_data, split_off
from spotlights.wbmm.recipes.datasets import load_named
from spotlights.wbmm.recipes.images import expand, images_in, read_image


def picture(width: int = 12, height: int = 10, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_folder(root: Path, counts: dict[str, int], *, width: int = 80, height: int = 70) -> Path:
    for label, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        for index in range(count):
            picture(width, height, 100 * label + index).save(root / name / f"{index}.png")
    return root


def load(root: Path, *, image_size: int | None = None) -> ImageData:
    return load_data(str(root), None, image_size=image_size, default_size=32)


def pixel(path: Path, channels: int | None = None) -> tuple[str, object]:
    image = read_image(path, channels)
    return image.mode, image.getpixel((0, 0))


def test_16_bit_values_are_scaled(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 40000, np.uint16)).save(tmp_path / "a.png")
    assert pixel(tmp_path / "a.png") == ("L", round(40000 / 257))
    assert pixel(tmp_path / "a.png", 3) == ("RGB", (156, 156, 156))


def test_32_bit_values_are_scaled(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 257 * 90, np.int32)).save(tmp_path / "large.tiff")
    Image.fromarray(np.full((4, 4), 90, np.int32)).save(tmp_path / "small.tiff")
    Image.fromarray(np.full((4, 4), 0.2, np.float32)).save(tmp_path / "unit.tiff")
    Image.fromarray(np.full((4, 4), np.nan, np.float32)).save(tmp_path / "nan.tiff")
    assert pixel(tmp_path / "large.tiff") == ("L", 90)
    assert pixel(tmp_path / "small.tiff") == ("L", 90)
    assert pixel(tmp_path / "unit.tiff") == ("L", 51)
    assert pixel(tmp_path / "nan.tiff") == ("L", 0)


def test_exif_rotation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(12, 10).save(tmp_path / "a.jpg", exif=exif)
    assert read_image(tmp_path / "a.jpg").size == (10, 12)


def test_transparency_is_laid_on_white(tmp_path: Path) -> None:
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.new("LA", (4, 4), (0, 0)).save(tmp_path / "grey.png")
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.save(tmp_path / "clear.gif", transparency=1)
    palette.save(tmp_path / "solid.gif")
    assert pixel(tmp_path / "clear.png") == ("RGB", (255, 255, 255))
    assert pixel(tmp_path / "grey.png") == ("L", 255)
    assert pixel(tmp_path / "clear.gif") == ("RGB", (255, 255, 255))
    assert pixel(tmp_path / "solid.gif") == ("RGB", (10, 20, 30))


def test_cmyk_and_bilevel_images_are_converted(tmp_path: Path) -> None:
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "red.tiff")
    Image.new("1", (4, 4), 1).save(tmp_path / "white.png")
    assert pixel(tmp_path / "red.tiff") == ("RGB", (255, 0, 0))
    assert pixel(tmp_path / "white.png") == ("L", 255)
    assert pixel(tmp_path / "red.tiff", 1) == ("L", 76)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".gif", ".tiff", ".bmp", ".webp"])
def test_damaged_images_are_user_errors(suffix: str, tmp_path: Path) -> None:
    whole = tmp_path / f"whole{suffix}"
    picture(64, 64).save(whole)
    content = whole.read_bytes()
    for number, damaged in enumerate([b"", b"hello", content[: len(content) // 2], content[:20]]):
        path = tmp_path / f"{number}{suffix}"
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=f"{number}{suffix}: cannot read the image: ") as caught:
            read_image(path)
        assert "\n" not in str(caught.value)


def test_missing_image_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_image(tmp_path / "a.png")


def test_expand_takes_files_folders_and_globs_once(tmp_path: Path) -> None:
    for name in ("b.png", "a.PNG", "deep/c.jpg", ".hidden/d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        picture().save(tmp_path / name)
    (tmp_path / "notes.txt").touch()
    names = [path.relative_to(tmp_path).as_posix() for path in images_in(tmp_path)]
    assert names == ["a.PNG", "b.png", "deep/c.jpg"]
    assert expand([tmp_path / "b.png", tmp_path, str(tmp_path / "*.png")]) == [
        tmp_path / name for name in ("b.png", "a.PNG", "deep/c.jpg")
    ]
    with pytest.raises(UserError, match="no such file or folder"):
        expand([str(tmp_path / "*.bmp")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no images in this folder"):
        expand([tmp_path / "empty"])


def test_embedded_digits_have_a_fixed_split() -> None:
    parts, names = load_named("digits")
    assert names == list("0123456789")
    assert parts["train"][0].shape == (4000, 1, 28, 28)
    assert parts["train"][0].dtype == torch.uint8
    assert torch.bincount(parts["train"][1]).tolist() == [400] * 10
    assert torch.bincount(parts["test"][1]).tolist() == [100] * 10
    assert int(parts["test"][0].long().sum()) == 25_884_291


def test_idx_files_are_found_plain_and_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (6, 28, 28), dtype=np.uint8)
    for prefix, count in (("train", 6), ("t10k", 3)):
        header = b"\0\0\x08\x03" + b"".join(size.to_bytes(4, "big") for size in (count, 28, 28))
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + pixels[:count].tobytes()))
        labels = b"\0\0\x08\x01" + count.to_bytes(4, "big") + bytes(range(count))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(labels)
    monkeypatch.setenv("SPOTLIGHTS_DATA", str(tmp_path))
    for root in (None, str(folder)):
        parts, names = load_named("fashion-mnist", root)
        assert names[9] == "Ankle boot"
        assert torch.equal(parts["train"][0], torch.from_numpy(pixels)[:, None])
        assert parts["test"][1].tolist() == [0, 1, 2]
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x09\0")
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte: damaged data file"):
        load_named("fashion-mnist")


def test_one_folder_of_classes(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "data", {"rote Äpfel": 3, "绿色": 2})
    (root / "rote Äpfel" / "Thumbs.db").touch()
    (root / ".cache").mkdir()
    result = load(root)
    assert result.class_names == ["rote Äpfel", "绿色"]
    assert (result.channels, result.image_size, result.augment, result.skipped) == (3, 32, "photo", [])
    images = result.splits["all"]
    assert isinstance(images, FileImages)
    batch, targets = images.__getitems__([0, 4])
    assert (batch.shape, batch.dtype, targets.tolist()) == ((2, 3, 32, 32), torch.uint8, [0, 1])


def test_folder_with_parts(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", {"a": 3, "b": 2})
    make_folder(tmp_path / "valid", {"a": 1, "b": 1})
    make_folder(tmp_path / "test", {"b": 2})
    result = load(tmp_path)
    assert {part: images.targets.tolist() for part, images in result.splits.items()} == {
        "train": [0, 0, 0, 1, 1],
        "val": [0, 1],
        "test": [1, 1],
    }


def test_a_class_called_train_is_a_class(tmp_path: Path) -> None:
    assert load(make_folder(tmp_path / "data", {"car": 2, "train": 2})).class_names == ["car", "train"]


def test_small_images_of_one_size_are_packed_at_their_own_size(tmp_path: Path) -> None:
    root = tmp_path / "data"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        picture(20, 20).convert("L").save(root / name / "0.png")
    result = load(root)
    images = result.splits["all"]
    assert isinstance(images, TensorImages)
    assert (images.images.shape, result.channels) == ((2, 1, 20, 20), 1)
    assert torch.equal(images.images[0, 0], torch.from_numpy(np.array(picture(20, 20).convert("L"))))


def test_unreadable_images_are_skipped_and_named(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "data", {"a": 2, "b": 2})
    (root / "b" / "broken.jpg").write_bytes(b"hello")
    result = load(root)
    assert len(result.splits["all"]) == 4
    assert len(result.skipped) == 1
    assert result.skipped[0].startswith(f"{root}/b/broken.jpg: cannot read the image")


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"cat": 2}, "two or more classes; found only 'cat'"),
        ({}, "two or more classes; found none"),
        ({"cat": 2, "a dog": 0}, "class 'a dog' has no image; add some or remove its folder"),
    ],
)
def test_folders_that_cannot_be_learned_from(counts: dict[str, int], message: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(UserError, match=message):
        load(make_folder(tmp_path / "data", counts))


def test_class_with_unreadable_images_only(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "data", {"a": 2, "b": 0})
    (root / "b" / "0.png").write_bytes(b"hello")
    with pytest.raises(UserError, match="class 'b' has no readable image"):
        load(root)


def test_validation_class_unknown_to_training(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", {"a": 1, "b": 1})
    make_folder(tmp_path / "val", {"a": 1, "c": 1})
    with pytest.raises(UserError, match="has a class 'c' that"):
        load(tmp_path)


def test_missing_folder_and_file_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is missing"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is not a folder"):
        load(tmp_path / "file")


def test_images_beyond_the_cache_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_folder(tmp_path / "data", {"a": 2, "b": 2})
    cached = load(root).splits["all"]
    monkeypatch.setattr(recipes_data, "CACHE_BYTES", 0)
    uncached = load(root).splits["all"]
    assert isinstance(cached, FileImages)
    assert isinstance(uncached, FileImages)
    assert (len(cached.cache), len(uncached.cache)) == (4, 0)
    difference = cached.view(3).int() - uncached.view(3).int()
    assert int(difference.abs().max()) <= 40  # the cache holds them shrunk to twice the side
    assert float(difference.float().abs().mean()) < 8


def test_split_is_by_class_and_seed() -> None:
    targets = torch.tensor([0] * 20 + [1] * 10 + [2])
    images = TensorImages(torch.arange(31, dtype=torch.uint8).view(31, 1, 1, 1), targets)
    kept, held = split_off(images, 0.2, 5)
    assert held is not None
    assert torch.bincount(held.targets, minlength=3).tolist() == [4, 2, 0]
    assert sorted(kept.__getitems__(range(len(kept)))[0].flatten().tolist() + held.images.flatten().tolist()) == list(
        range(31)
    )
    again = split_off(images, 0.2, 5)[1]
    other = split_off(images, 0.2, 6)[1]
    assert again is not None
    assert other is not None
    assert torch.equal(again.images, held.images)
    assert not torch.equal(other.images, held.images)
    assert split_off(images, 0.0, 5)[1] is None


def test_single_images_cannot_be_split() -> None:
    images = TensorImages(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]))
    with pytest.raises(UserError, match="too few images to hold some back"):
        split_off(images, 0.5, 0)


def test_limit_keeps_classes_balanced() -> None:
    result = load_data(None, None, image_size=None, default_size=32, limit=25)
    assert torch.bincount(result.splits["train"].targets).tolist() == [3] * 5 + [2] * 5
    assert len(result.splits["test"]) == 25


def test_adapt_changes_channels_and_size() -> None:
    grey = torch.randint(256, (3, 1, 8, 8), dtype=torch.uint8)
    colour = adapt(grey, 3, 8)
    assert colour.shape == (3, 3, 8, 8)
    assert torch.equal(adapt(colour, 1, 8), grey)
    assert adapt(grey, 1, 16).shape == (3, 1, 16, 16)
    constant = torch.full((1, 1, 8, 8), 77, dtype=torch.uint8)
    assert adapt(constant, 1, 5).unique().tolist() == [77]


def test_affine_without_ranges_is_the_identity_and_never_a_flip_of_digits() -> None:
    image = torch.zeros(64, 1, 28, 28)
    image[:, :, :, :14] = 1
    assert random_affine(image, PROFILES["none"]) is image
    warped = random_affine(image, PROFILES["digits"])
    assert warped.shape == image.shape
    assert bool((warped[..., :14].mean((1, 2, 3)) > warped[..., 14:].mean((1, 2, 3)) + 0.3).all())
    mirrored = random_affine(image, PROFILES["fashion"])[:, 0, 14, 3]
    assert 10 < int((mirrored > 0.5).sum()) < 54


@pytest.mark.parametrize(
    ("augmentation", "expected"),
    [
        (Augmentation(translate=0.25), (0.0, 0.5)),
        (Augmentation(zoom=1.0), (0.5, 2.0)),
    ],
)
def test_affine_ranges(augmentation: Augmentation, expected: tuple[float, float]) -> None:
    torch.manual_seed(0)
    ramp = torch.linspace(-1, 1, 201).expand(200, 1, 201, 201)
    warped = random_affine(ramp, augmentation)[:, 0, 100]
    centre, step = warped[:, 100], warped[:, 110] - warped[:, 100]
    # A ramp reads off where each output position came from: its value is the shift, its slope the scale.
    found = centre.abs() if augmentation.translate else step / 0.1
    low, high = expected
    assert low - 0.01 <= float(found.min()) < low + 0.1 * (high - low)
    assert high - 0.1 * (high - low) < float(found.max()) <= high + 0.01


@pytest.mark.parametrize("profile", list(PROFILES))
@pytest.mark.parametrize("channels", [1, 3])
def test_training_views_of_files(profile: str, channels: int) -> None:
    image = picture(50, 40).convert("L" if channels == 1 else "RGB")
    transform = training_transform(24, channels, PROFILES[profile])
    views = [transform(image) for _ in range(8)]
    assert {(view.shape, view.dtype) for view in views} == {((channels, 24, 24), torch.uint8)}
    assert any(not torch.equal(view, views[0]) for view in views) == (profile != "none")
