"""The notebooks run from top to bottom, and what they assert holds; they are stored as written, without outputs."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from notebooks.text import main, notebook_of, stored, text_of

NOTEBOOK_DIR = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(NOTEBOOK_DIR.glob("*.ipynb"))
COARSER = {
    "01_real_traffic": {"REQUESTS = 1500": "REQUESTS = 300"},
    "02_is_it_worth_it": {
        "PROMPTS = [250, 500, 1000, 2000, 4000, 8000]": "PROMPTS = [250, 1000, 4000]",
        "LOADS = np.geomspace(4_000, 28_000, 6)": "LOADS = np.geomspace(4_000, 28_000, 5)",
        "LARGE_LOADS = np.geomspace(500, 6_000, 8)": "LARGE_LOADS = np.geomspace(500, 6_000, 4)",
        "GBITS = [200, 50, 25, 10, 5]": "GBITS = [200, 25, 5]",
    },
    "03_how_many": {"PS, DS = range(3, 9), range(2, 6)": "PS, DS = range(5, 8), range(3, 5)"},
    "04_push_or_pull": {
        "REQUESTS = 300": "REQUESTS = 150",
        "PROMPTS = [500, 1000, 2000, 4000, 8000, 16000]": "PROMPTS = [500, 4000, 16000]",
    },
    "05_a_dead_d": {"SEEDS = range(1, 6)": "SEEDS = range(1, 3)"},
    "06_one_more_dollar": {},
}
"""By day, fewer runs than a notebook makes: answers are coarser, and what it asserts of them must hold as well. One
without fewer runs is run at night."""
BY_DAY = pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if COARSER.get(path.stem)], ids=lambda path: path.stem
)
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@EACH
def test_it_is_stored_without_outputs_and_with_ids_that_stay(path: Path) -> None:
    content = path.read_text(encoding="utf-8")
    assert content == stored(notebook_of(text_of(json.loads(content)))), (
        "python notebooks/text.py --clean notebooks/*.ipynb"
    )
    nbformat.validate(nbformat.reads(content, 4))


@EACH
def test_the_readme_links_each_notebook(path: Path) -> None:
    assert f"({path.name})" in (NOTEBOOK_DIR / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@BY_DAY
def test_it_runs_from_top_to_bottom(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    for fine, coarse in COARSER[path.stem].items():
        (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and fine in cell.source)
        cell.source = cell.source.replace(fine, coarse)
    runs(notebook)


@pytest.mark.nightly
@EACH
def test_it_runs_as_it_is_stored(path: Path) -> None:
    runs(nbformat.read(path, 4))


def runs(notebook: nbformat.NotebookNode) -> None:
    """From top to bottom, with pictures and without warnings."""
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK_DIR)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 2
    for picture in pictures:  # each is described for those who do not see it
        assert len(picture.metadata["image/png"]["alt"]) > 40
    assert "Warning" not in "".join(output.text for output in outputs if output.output_type == "stream")
    # It ends with an answer.
    assert any(output.output_type == "stream" and output.name == "stdout" for output in code[-1].outputs)


def test_each_has_a_coarser_form() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(COARSER)


RUN = """# %% [markdown]
# # Title
#
# - a list
#     indented

# %%
x = 1

# a comment
print(x)
"""


def test_text_and_back() -> None:
    notebook = notebook_of(RUN)
    assert text_of(notebook) == RUN
    markdown, code = notebook["cells"]
    assert "".join(markdown["source"]) == "# Title\n\n- a list\n    indented"
    assert (code["id"], code["outputs"], code["execution_count"]) == ("cell-2", [], None)
    with pytest.raises(ValueError, match="stands before the first"):
        notebook_of("x = 1\n" + RUN)


def test_what_running_leaves_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "n.ipynb"
    notebook = notebook_of(RUN)
    clean = stored(notebook)
    notebook["cells"][1] |= {"execution_count": 7, "outputs": [{"output_type": "stream"}], "id": "f00"}
    notebook["metadata"]["language_info"]["version"] = "3.99"
    file.write_text(stored(notebook))
    main(["--clean", str(file)])
    assert file.read_text() == clean
    main([str(file)])
    assert file.with_suffix(".py").read_text() == RUN
    file.unlink()
    main([str(file.with_suffix(".py"))])
    assert file.read_text() == clean
