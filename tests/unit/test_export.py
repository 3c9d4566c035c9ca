"""An exported run is a folder that the Hugging Face hub and PyTorch can read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.complaints import complaint
from tests.small_runs import ALGORITHMS, ctrl_c_at, small_model, small_run
from tests.small_tasks import regression
from tests.tiers import thorough
from tests.unit.test_worker import SHORT
from tests.worker_threads import Crew

import edgegossip as eg
from edgegossip.cli.main import main
from edgegossip.contract.errors import Interrupted, RunFolderError, UsageError
from edgegossip.real.gathering import Gathering
from edgegossip.report import export as exporting
from edgegossip.report.export import export
from edgegossip.runs.results import Results
from edgegossip.runs.runner import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    run(small_run("gosgd"), out=out, num_threads=0, command="edgegossip run mine --x 'a|b'")
    return out


@pytest.fixture(scope="module")
def exported(folder: Path) -> Path:
    """The export of that run; tests only read it."""
    return export(folder)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing: figures take most of an export's time."""
    monkeypatch.setattr(exporting, "_pictures", lambda data: [])


def front_matter(card: str) -> list[str]:
    lines = card.splitlines()
    assert lines[0] == "---"
    return lines[1 : lines.index("---", 1)]


def test_the_model_is_a_state_dict_of_the_runs_result(folder: Path, exported: Path) -> None:
    assert exported == folder / "export"
    model = small_model()
    model.load_state_dict(load_file(exported / "model.safetensors"))
    kept = load_file(folder / "params.safetensors")
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    with safe_open(exported / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_config_has_every_setting_and_every_shape(folder: Path, exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    assert config["model"] == "small_model"
    assert config["experiment"]["algorithm"]["type"] == "GoSGD"
    assert config["tensors"]["0.weight"] == {"shape": [4, 1, 3, 3], "dtype": "float32"}
    kept = load_file(folder / "params.safetensors")
    assert config["num_parameters"] == sum(tensor.numel() for tensor in kept.values())


def test_the_card_has_the_runs_numbers_and_figures(folder: Path, exported: Path) -> None:
    card = (exported / "README.md").read_text()
    accuracy = json.loads((folder / "summary.json").read_text())["final_accuracy"]
    lines = front_matter(card)
    assert "library_name: edgegossip" in lines
    assert f"      value: {accuracy}" in lines
    assert f"| accuracy | {100 * accuracy:.2f}" in card
    assert "<code>edgegossip run mine --x 'a&#124;b'</code>" in card
    for picture in (exported / "figures").iterdir():
        assert f"](figures/{picture.name})" in card
    assert (exported / "figures" / "accuracy-time.png").read_bytes()[1:4] == b"PNG"


LIVE = (
    "![x](https://evil/x.png)",
    "[x](javascript:alert(1))",
    "[x]: https://evil",
    "**b** __b__ *e* _e_ ~~s~~ `c`",
    "<https://evil> <b>b</b> &lt;",
    "# heading",
    "- item",
    "+ item",
    "1. item",
    "2) item",
    "> quote",
    "---",
    "\\[x](https://evil)",
    "a | b",
)


@thorough
@pytest.mark.usefixtures("undrawn")
def test_no_name_in_a_card_is_markup(folder: Path, tmp_path: Path) -> None:
    markdown = pytest.importorskip("markdown_it", reason="needs pip install markdown-it-py")
    parser = markdown.MarkdownIt("commonmark").enable(["table", "strikethrough"])
    first, rest = (folder / "events.jsonl").read_text().split("\n", maxsplit=1)

    def shape(name: str) -> list[str]:
        """The structure of a card with this name everywhere."""
        header = json.loads(first) | {
            "name": name,
            "recipe": None,
            "command": name,
            "seed": name,
        }
        header["algorithm"] |= {"type": name, "compressor": name}
        header["versions"] = {name: name}
        header["task"] |= {"model": name}
        out = tmp_path / str(len([*tmp_path.iterdir()]))
        shutil.copytree(folder, out, ignore=shutil.ignore_patterns("export"))
        (out / "events.jsonl").write_text(json.dumps(header) + "\n" + rest)
        card = (export(out) / "README.md").read_text()
        tokens = parser.parse(card.partition("\n---\n")[2])
        text = " ".join(each.content for token in tokens for each in token.children or [])
        assert " ".join(name.split()) in text
        return [each.type for token in tokens for each in [token, *(token.children or [])]]

    def structure(name: str) -> list[str]:
        return [each for each in shape(name) if each not in ("text", "text_special")]

    plain = structure("plain")
    assert {name: structure(name) for name in LIVE} == dict.fromkeys(LIVE, plain)


@pytest.mark.parametrize(
    "text", ["https://evil", "www.evil.org", "WWW.evil.org", "$x$", "@all"]
)
def test_no_address_mention_or_formula_is_live(text: str) -> None:
    assert "\\" in exporting._plain(text)


@pytest.mark.usefixtures("undrawn")
def test_a_card_names_other_metrics_than_accuracy(tmp_path: Path) -> None:
    experiment = eg.Experiment(
        task=regression(),
        algorithm=eg.Gossip(topology=eg.ring(3), num_rounds=4),
        platforms=eg.uneven(3),
    )
    results = run(experiment, out=tmp_path, num_threads=0)
    card = (eg.export(tmp_path) / "README.md").read_text()
    assert '- "mae"' in front_matter(card)
    assert f"      value: {results.final_value}" in front_matter(card)
    assert "accura" not in card


def compared(out: Path) -> dict[str, Results]:
    runs = {name: small_run(name) for name in ("gosgd", "gossip")}
    return eg.compare(eg.Comparison(experiments=runs, baseline="gossip"), out=out)


@thorough
@pytest.mark.usefixtures("undrawn")
def test_of_a_comparison_one_run_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = compared(tmp_path / "both")
    command = ["export", str(tmp_path / "both"), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "choose one with --only: gosgd, gossip" in complaint(capsys)
    assert main([*command, "--only", "gosdg"]) == 2
    assert "did you mean 'gosgd'?" in complaint(capsys)
    assert not (tmp_path / "out").exists()
    assert main([*command, "--only", "gosgd"]) == 0
    assert capsys.readouterr().out == f"exported: {tmp_path / 'out'}\n"
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], x) for name, x in results["gosgd"].params.items())


@thorough
@pytest.mark.usefixtures("undrawn")
def test_a_gathered_run_is_exported(tmp_path: Path) -> None:
    Crew(tmp_path).all(SHORT)
    results = Gathering(SHORT, tmp_path).finish()
    found = load_file(export(tmp_path) / "model.safetensors")
    assert all(torch.equal(found[name], x) for name, x in results.params.items())


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_was_interrupted_says_so_on_its_card(tmp_path: Path) -> None:
    with ctrl_c_at(8, ALGORITHMS["gosgd"]), pytest.raises(Interrupted):
        run(small_run("gosgd"), out=tmp_path, num_threads=0)
    card = (export(tmp_path) / "README.md").read_text()
    assert "> **Not complete.** gosgd was interrupted after" in card


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda at: None, RunFolderError, "no run in"),
        (lambda at: (at / "params.safetensors").unlink(), RunFolderError, "left no model"),
        (lambda at: (at / "params.safetensors").write_bytes(b"x"), RunFolderError, "damaged"),
        (lambda at: (at / "export").mkdir(), RunFolderError, "is not a model card of a run"),
    ],
    ids=["no run", "no model", "damaged", "other card"],
)
def test_what_cannot_be_exported_is_explained(
    tmp_path: Path,
    folder: Path,
    make: object,
    error: type[Exception],
    message: str,
) -> None:
    assert callable(make)
    at = tmp_path / "run"
    at.mkdir()
    if message != "no run in":
        for name in ("events.jsonl", "summary.json", "params.safetensors", "experiment.json"):
            (at / name).write_bytes((folder / name).read_bytes())
        make(at)
        if (at / "export").exists():
            (at / "export" / "README.md").write_text("mine")
    with pytest.raises(error, match=message):
        export(at)
    assert not (at / "export" / "model.safetensors").exists()


@pytest.mark.usefixtures("undrawn")
def test_folders_may_be_text(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "out"
    assert export(str(folder), str(out)) == out
    assert (out / "model.safetensors").exists()


def test_a_single_run_takes_no_only(folder: Path) -> None:
    with pytest.raises(UsageError, match="single run, so leave out --only"):
        export(folder, only="gosgd")


@pytest.mark.slow
def test_hugging_face_reads_the_card(folder: Path, exported: Path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="needs pip install huggingface_hub")
    card = hub.ModelCard.load(exported / "README.md")
    assert card.data.library_name == "edgegossip"
    [result] = card.data.eval_results
    assert (result.metric_type, result.dataset_name) == ("accuracy", "noise")
    accuracy = json.loads((folder / "summary.json").read_text())["final_accuracy"]
    assert result.metric_value == pytest.approx(accuracy)
