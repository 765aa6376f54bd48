import os
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spotlights.runtime.errors import UserError
from spotlights.runtime.report import Page, new_figure

HOSTILE = "<script>alert(\"1\")</script> & 'quoted'"


def digit(seed: int, size: int = 28) -> np.ndarray:
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size] / size - 0.5
    ring = np.hypot(x * rng.uniform(1, 1.6), y * rng.uniform(0.8, 1.2))
    return (255 * np.exp(-(((ring - 0.28) / 0.07) ** 2))).astype(np.uint8)


@cache
def sample_page() -> Page:
    page = Page(
        "Windowed batch matrix multiplication on 5,000 digits",
        "The WBMM network reads 98.7 % of the held-out digits (95 % interval 97.9 to 99.3); on 1,000 test images it "
        "cannot be told apart from a depthwise 5 x 5 twin.",
        {"machine": "AMD EPYC 7B13, 2 cores, 2 threads", "torch": "2.14.1", "seed": 0, "images": 5000, "epochs": 12},
    )
    page.section("Accuracy", "All four networks share everything but the token mixer.\n\nEach was trained once.")
    page.table(
        ["network", "parameters", "accuracy", "95 % interval", "images per second"],
        [
            ["WBMM 7 x 7", 812_304, "98.7 %", "97.9 – 99.3 %", 2134.2],
            ["DW 5 x 5", 801_216, "98.4 %", "97.6 – 99.1 %", 2890.7],
            ["DW 13 x 13", 838_080, "98.5 %", "97.7 – 99.2 %", None],
            ["Conv 3 x 3", 1_904_832, "98.1 %", "97.2 – 98.9 %", 1977.0],
        ],
        caption="Test accuracy over 1,000 images; intervals by bootstrap.",
        highlight=0,
    )
    page.section("Training")
    epochs = np.arange(1, 13)
    with new_figure(columns=2) as (figure, axes):
        for index, name in enumerate(["WBMM 7 x 7", "DW 5 x 5", "DW 13 x 13", "Conv 3 x 3"]):
            axes[0].plot(epochs, (2 + 0.1 * index) * np.exp(-epochs / 3) + 0.05, label=name)
            axes[1].plot(epochs, 99 - 20 * np.exp(-epochs / (2 + 0.2 * index)), label=name)
        axes[0].set(title="Loss", xlabel="epoch", ylabel="cross-entropy")
        axes[1].set(title="Validation accuracy", xlabel="epoch", ylabel="%")
        axes[1].legend()
    page.figure(figure, alt="Loss falls and accuracy rises for all four networks.", caption="Learning curves.")
    with new_figure(4.6, 3.8) as (figure, axes):
        axes.imshow(np.eye(10) * 95 + 0.5)
        axes.grid(visible=False)
        axes.set(title="Confusion", xlabel="predicted", ylabel="true", xticks=range(10), yticks=range(10))
    page.figure(figure, alt="Confusion matrix, nearly diagonal.", caption="Rows are the true digits, in per cent.")
    page.section("Sample predictions")
    page.gallery([(digit(i), f"says {i % 7} (0.{99 - i}), is {i % 7}", i not in (2, 5)) for i in range(10)])
    page.gallery(
        [
            (Image.fromarray(np.stack([digit(i, 320)] * 3, axis=-1)), f"{HOSTILE} photo {i}\nsecond line", None)
            for i in range(3)
        ]
    )
    return page


class Outline(HTMLParser):
    """Checks that tags nest, and collects them."""

    VOID = frozenset({"meta", "img", "source"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.data: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.data.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_page_is_well_formed_and_accessible():
    outline = Outline(sample_page().html())
    assert outline.all("html") == [{"lang": "en"}]
    assert len(outline.all("h1")) == 1
    assert len(outline.all("h2")) == 3
    headings = {heading["id"] for heading in outline.all("h2")}
    assert {section["aria-labelledby"] for section in outline.all("section")} == headings
    images = outline.all("img")
    assert len(images) == 2 + 10 + 3
    assert all(image["alt"] and image["width"] and image["height"] for image in images)
    assert [header["scope"] for header in outline.all("th")] == ["col"] * 5 + ["row"] * 4


def test_page_needs_nothing_from_outside():
    html = sample_page().html()
    outline = Outline(html)
    sources = [image["src"] for image in outline.all("img")] + [source["srcset"] for source in outline.all("source")]
    assert all(source is not None and source.startswith("data:image/") for source in sources)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in outline.tags}
    assert not re.search(r"https?://|url\(|@import", html)


def test_all_text_is_escaped():
    page = Page(HOSTILE, HOSTILE, {HOSTILE: HOSTILE}, lang='en" onload="x')
    page.section(HOSTILE, HOSTILE)
    page.text(HOSTILE)
    page.table([HOSTILE, HOSTILE], [[HOSTILE, HOSTILE]], caption=HOSTILE)
    with new_figure() as (figure, axes):
        axes.set_title(HOSTILE)
    page.figure(figure, alt=HOSTILE, caption=HOSTILE)
    page.gallery([(digit(0), HOSTILE, False)])
    html = page.html()
    assert "<script" not in html
    outline = Outline(html)
    assert outline.all("html") == [{"lang": 'en" onload="x'}]
    assert [image["alt"] for image in outline.all("img")] == [HOSTILE, f"wrong: {HOSTILE}"]
    assert "".join(outline.data).count(HOSTILE) == 5 + 3 + 5 + 1 + 1  # head, section, table, figure, gallery


def test_numbers_are_formatted_and_set_flush_right():
    page = Page("t")
    page.table(
        ["name", "count", "share", "measured", "text"],
        [["a", 1234567, 0.98765, "98.7 ± 0.3 %", "1 of 2"], ["3x3", None, np.float32(2), "−1", "two"]],
        highlight=[1],
    )
    html = page.html()
    assert '<tr><th scope="row">a</th><td class="number">1,234,567</td><td class="number">0.9877</td>' in html
    assert '<td class="number">98.7 ± 0.3 %</td><td>1 of 2</td></tr>' in html
    assert '<tr class=highlight><th scope="row">3x3</th><td class="number">–</td><td class="number">2</td>' in html


def test_table_without_rows():
    page = Page("t")
    page.table(["a", "b"], [])
    assert '<thead><tr><th scope="col">a</th><th scope="col">b</th></tr></thead>' in page.html()


def test_wrong_predictions_are_marked_in_words():
    page = Page("t")
    page.gallery([(digit(0), "says 3", False), (digit(1), "says 4", True), (digit(2), "says 5", None)])
    text = " ".join("".join(Outline(page.html()).data).split())
    assert "says 3✗ wrong" in text
    assert "says 4✓ right" in text
    assert "says 5 " in text


@pytest.mark.parametrize(
    ("picture", "size", "crisp"),
    [
        (digit(0), (112, 112), True),
        (digit(0)[..., None] / 255.0, (112, 112), True),
        (np.zeros((20, 40, 3), np.uint8), (80, 40), True),
        (np.zeros((64, 64, 4), np.uint8), (128, 128), True),
        (np.zeros((300, 600, 3), np.uint8), (176, 88), False),
        (Image.new("CMYK", (300, 300)), (176, 176), False),
        (Image.new("P", (16, 16)), (112, 112), True),
    ],
)
def test_gallery_pictures(picture, size, crisp):
    page = Page("t")
    page.gallery([(picture, "", None)])
    image = Outline(page.html()).all("img")[0]
    assert (int(image["width"]), int(image["height"])) == size
    assert (image.get("class") == "crisp") is crisp
    assert image["alt"] == "picture"


def test_figures_follow_the_page_into_the_dark_and_print_on_white(tmp_path):
    with new_figure() as (figure, axes):
        axes.plot([1, 2], label="line")
        axes.legend()
    page = Page("t")
    page.figure(figure, alt="a line")
    outline = Outline(page.html())
    assert outline.all("source")[0]["media"] == "screen and (prefers-color-scheme: dark)"
    assert outline.all("source")[0]["srcset"] != outline.all("img")[0]["src"]
    figure.savefig(tmp_path / "figure.png")
    assert Image.open(tmp_path / "figure.png").convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_foreign_figures_keep_their_colours():
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().plot([1, 2])
    page = Page("t")
    page.figure(figure, alt="a line")
    assert Outline(page.html()).all("source") == []


def test_same_content_same_bytes():
    pages = [Page("t"), Page("t")]
    for page in pages:
        with new_figure() as (figure, axes):
            axes.plot([1, 2])
        page.figure(figure, alt="a line")
    assert pages[0].html() == pages[1].html()


def test_save_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    assert Page("new").save(path) == path
    assert "<h1>new</h1>" in path.read_text(encoding="utf-8")
    assert os.listdir(tmp_path) == ["report.html"]


def test_unwritable_target_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*report\.html: No such file or directory"):
        Page("t").save(tmp_path / "missing" / "report.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*folder: Is a directory"):
        Page("t").save(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]


def test_bad_arguments():
    page = Page("t")
    with pytest.raises(ValueError, match="rows: row 1 has 1 values, expected 2"):
        page.table(["a", "b"], [[1, 2], [3]])
    with pytest.raises(ValueError, match=r"highlight: got \[2\], expected indices of the 1 rows"):
        page.table(["a"], [[1]], highlight=2)
    with pytest.raises(ValueError, match="alt: got an empty text"), new_figure() as (figure, _):
        page.figure(figure, alt=" ")
    with pytest.raises(ValueError, match=r"items: got a picture of shape \(3, 28, 28\)"):
        page.gallery([(np.zeros((3, 28, 28)), "", None)])
    with pytest.raises(TypeError, match="items: got a picture of dtype int64"):
        page.gallery([(np.zeros((28, 28), dtype=np.int64), "", None)])


PROBE = """{
  images: [...page.images].map(image => image.naturalWidth),
  page: page.documentElement.scrollWidth,
  outside: [...page.body.querySelectorAll("*")].filter(element => !element.closest(".scroll table")
    && (element.getBoundingClientRect().right > view.innerWidth || element.getBoundingClientRect().left < 0))
    .map(element => element.outerHTML.slice(0, 80)),
  sizes: [...page.querySelectorAll(".gallery .crisp")].map(image => image.getBoundingClientRect().width),
  background: view.getComputedStyle(page.body).backgroundColor
}"""


@pytest.mark.browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_browser_shows_the_page(tmp_path: Path, browser_screenshot, browser_evaluate, width, dark):
    path = sample_page().save(tmp_path / "report.html")
    seen = browser_evaluate(path, PROBE, width=width, dark=dark)
    assert len(seen["images"]) == 15
    assert all(natural > 0 for natural in seen["images"])
    assert seen["page"] == width
    assert seen["outside"] == []
    assert seen["sizes"] == [28 * 4 + 2] * 10
    assert seen["background"] == ("rgb(22, 24, 26)" if dark else "rgb(255, 255, 255)")

    png = Image.open(browser_screenshot(path, tmp_path / "page.png", width=width, height=1600, dark=dark))
    assert png.size == (width, 1600)
    pixels = np.asarray(png.convert("L"), dtype=float)
    paper = 24 if dark else 255
    written = np.abs(pixels - paper) > 60
    assert pixels[2, 2] == pytest.approx(paper, abs=2)
    assert 0.02 < written.mean() < 0.5
    assert written[:400].any()
    assert written[1200:].any()
