"""The page: what it says of a run, and that it runs nothing but its own scripts."""

import base64
import hashlib
import json
import math
import re
from array import array
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.tools.report.run_folders import HOSTILE, train_record, write_run
from trainer.tools.report.page import GENERATOR, Watch, render
from trainer.tools.report.plan import Plan
from trainer.tools.report.records import Curve, Records
from trainer.tools.report.run import Run, labels, read_run

pytest.importorskip("bokeh")


OTHERS = ["--training.steps", "7", "--training.global_batch_size", "8", "--training.local_batch_size", "1"]
OTHERS += [
    "--optimizer.weight_decay",
    "0.5",
    "--lr_schedule.warmup_steps",
    "1",
    "--run.seed",
    "7",
    "--training.seq_len",
    "64",
]
OTHERS += ["--metrics.interval_steps", "2", "--checkpoint.keep", "3", "--evaluation.interval_steps", "5"]


class Parsed(HTMLParser):
    """Texts and tags of a page. Scripts and styles are no texts."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not (self.open and self.open[-1] == "style") and data.strip():
            self.texts.append(" ".join(data.split()))


def page_of(*folders, plans=None, watch=None) -> str:
    runs = [read_run(folder, label) for folder, label in zip(folders, labels(folders), strict=True)]
    return render(runs, plans or [None] * len(runs), watch)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """The page of two runs with all kinds of records, whose names and texts are hostile."""
    folder = tmp_path_factory.mktemp("runs")
    samples = {"kind": "samples", "step": 2, "samples": [{"prompt": "Once", "text": f" upon {HOSTILE}"}]}
    records = [
        train_record(1, 3.25, memory_peak_gib=1.25),
        train_record(2, None, **{HOSTILE: 1.5}),
        train_record(3, 2.125, **{HOSTILE: 2.5}),
        {"kind": "eval", "dataset": HOSTILE, "step": 3, "loss": 2.75, "perplexity": 15.6},
        {"kind": "checkpoint", "step": 3, "blocked_s": 0.5, "background_s": 1.5},
        {"kind": "straggler", "step": 3, "rank": 5, "reason": HOSTILE},
        {"kind": HOSTILE, "step": 3, "why": HOSTILE},
        samples,
        "{damaged",
    ]
    settings = {"optimizer.lr": "0.01", "metrics.sinks": "jsonl,mlflow", "metrics.notes": HOSTILE}
    settings["metrics.mlflow_tracking_uri"] = "http://me:secret@host/x"
    flags = [word for key, value in settings.items() for word in (f"--{key}", value)]
    hostile = write_run(folder / HOSTILE.replace("/", "-"), records, flags, cpu=HOSTILE, command=["train.py", HOSTILE])
    plain = write_run(
        folder / "plain",
        [train_record(1, 4.5, memory_peak_gib=1.5)],
        world_size=8,
        git_clean=False,
        packages={"torch": "2.12"},
    )
    plan = Plan(1.5, {"parameters": 1.25, "activations": 0.25}, "backward of output", is_gpu=True)
    return page_of(hostile, plain, plans=[plan, "parallel.tp: must divide 4"])


def texts(page: str) -> str:
    return "\n".join(Parsed(page).texts)


def test_texts_of_files_are_escaped_everywhere(page):
    parsed = Parsed(page)
    assert page.count("<script") == len(parsed.scripts) == 9
    assert HOSTILE not in page and "&49" not in texts(page)  # nor is it a template
    assert texts(page).count("alert('x')") > 10  # the text itself is shown: name, dataset, metric, settings, samples
    assert not any(key.startswith("on") for _, attributes in parsed.tags for key in attributes)


def test_the_policy_allows_the_scripts_of_the_page_only(page):
    parsed = Parsed(page)
    policy = next(a["content"] for tag, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in parsed.scripts[1:]]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes
    assert "unsafe-eval" not in policy and "default-src 'none'" in policy


def test_the_page_refers_to_nothing_outside(page):
    for _, attributes in Parsed(page).tags:
        assert not {"src", "srcset", "action"} & attributes.keys()
        assert attributes.get("href", "#").startswith("#")
    assert GENERATOR in page[:1000]


def test_the_models_have_the_values_of_the_records_and_no_text_of_a_run(page):
    data = json.loads(Parsed(page).scripts[0])
    assert data["watch"] is None
    values = [np.frombuffer(base64.b64decode(text), "<f8").tolist() for text in data["arrays"]]
    loss = data["series"]["figure-0"][0]
    assert (loss["run"], values[loss["steps"]]) == (0, [1, 2, 3])
    assert values[loss["y"]][::2] == [3.25, 2.125] and math.isnan(values[loss["y"]][1])
    assert set(data["roots"]) >= {"figure-0", "figure-events"}
    assert "alert" not in json.dumps(data)


@pytest.mark.parametrize(
    "text",
    [
        "optimizer.lr",  # settings in which the runs differ
        "0.01",
        "3.25",
        "2.75 at step 3",
        "blocked training for 0.5 s, 1.5 s in the background",
        "rank 5: ",
        "in one record",
        "the plan has its peak of 1.5 GiB in backward of output (parameters 1.25, activations 0.25).",
        "no plan (parallel.tp: must divide 4).",
        "Once",
        "1 line of metrics.jsonl is not a record and is not shown: 9",
        "git checkout abc123 # the run had uncommitted changes",
        "NGPU=8 ./run_llama_train.sh --config",
        "--run.name plain-again",
        "2.12",
        "http://...@host/x",
    ],
)
def test_the_page_says(page, text):
    assert text in texts(page)


def test_a_text_that_turns_the_direction_of_writing_is_shown_as_characters(tmp_path):
    turned = "a\u202eb"
    samples = {"kind": "samples", "step": 1, "samples": [{"prompt": turned, "text": turned}]}
    records = [train_record(1, **{turned: 1.5}), train_record(2, **{turned: 2.5}), samples]
    records += [{"kind": "eval", "dataset": turned, "step": step, "loss": 2.0} for step in (1, 2)]
    folders = [write_run(tmp_path / f"{i}{turned}", records) for i in range(2)]
    page = page_of(*folders)
    assert "\u202e" not in page and page.count(r"a\u202eb") > 20


def test_a_run_that_ended_with_a_problem_says_so_first(tmp_path):
    end = {"kind": "end", "step": 1, "ending": "done", "problem": "its gradients have vanished"}
    page = texts(page_of(write_run(tmp_path / "run", [train_record(1), end])))
    assert "it ended, but its gradients have vanished" in page.partition("Drag in a figure")[0]


def test_few_settings_that_differ_are_columns_and_others_are_a_table(tmp_path):
    few, many = (["--optimizer.lr", "0.5"], ["--optimizer.lr", "0.25", *OTHERS])
    folders = [write_run(tmp_path / str(i), [train_record(1)], words) for i, words in enumerate((few, many))]
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "metrics.jsonl").touch()  # its settings are unknown, so they differ in nothing
    heads = Parsed(page_of(*folders, tmp_path / "2")).texts
    table = heads[heads.index("Run") : heads.index("Among the columns are the settings in which the runs differ.")]
    assert table.index("Run") < table.index("optimizer.lr") < table.index("Tokens")
    columns = table[table.index("Training loss") + 1 : table.index("Tokens")]
    assert len(columns) == 8 and "Other settings in which the runs differ" in heads
    named = [text for text in heads if text in {word[2:] for word in many if word.startswith("--")}]
    assert len(set(named)) == 11  # each in the table of runs, or in the other one


def test_passwords_of_urls_are_left_out(page):
    assert "secret" not in page


def test_every_figure_has_a_label_a_table_and_a_place_for_the_keyboard(page):
    tags = Parsed(page).tags
    plots = [a for tag, a in tags if tag == "div" and a.get("class", "").startswith("plot") and "tabindex" in a]
    titles = {a["id"] for tag, a in tags if tag == "h3" and "id" in a}
    figures = [a for tag, a in tags if tag == "figure"]
    assert plots and all(a["role"] == "img" and a["aria-label"] for a in plots)
    assert all(a["aria-labelledby"] in titles for a in figures)
    assert sum(tag == "caption" for tag, _ in tags) >= 2 * len(plots)
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids))


def test_a_run_without_records_and_files_says_so(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    page = texts(page_of(empty))
    assert "metrics.jsonl contains no training record yet" in page and "No events." in page
    assert "config.toml cannot be read (No such file or directory)" in page
    assert "environment.json cannot be read (No such file or directory)" in page


def test_damaged_configuration_and_environment_are_a_line(tmp_path):
    run = write_run(tmp_path / "run", [train_record(1)])
    (run / "config.toml").write_bytes(b"[model\n\xff")
    (run / "environment.json").write_text("[1]")
    page = texts(page_of(run))
    assert "config.toml cannot be read (it is no configuration)" in page
    assert "environment.json cannot be read (it is no JSON object)" in page


def test_ten_thousand_records_stay_below_six_megabytes(tmp_path):
    random = np.random.default_rng(0)  # its bits cannot be compressed
    steps = array("q", range(1, 10_001))
    curves = {f"train/value_{i}": Curve(steps, array("d", random.random(10_000))) for i in range(28)}
    run = Run(tmp_path, "run", Records(curves, train_steps=steps))
    page = render([run], [None])
    assert 4e6 < len(page.encode()) < 6e6
    assert "Drawn: not every record" not in page


def test_a_served_page_knows_its_version(tmp_path):
    page = page_of(write_run(tmp_path / "run", [train_record(1)]), watch=Watch("v<1>", 5.0))
    assert json.loads(Parsed(page).scripts[0])["watch"] == {"version": "v<1>", "interval_s": 5.0}
    assert "the page follows the runs" in texts(page)


def _luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_texts_and_lines_contrast_with_both_backgrounds(page):
    css = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]
    light, dark = re.findall(r"\{([^{}]*--page:[^{}]*)\}", css)
    for scheme in (light, dark):
        colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", scheme))
        assert sum(name.startswith(("run-", "phase-")) for name in colors) == 8 + 9
        for background in (colors["page"], colors["card"]):
            for name, color in colors.items():
                if name in ("page", "card", "target", "line"):  # "line" separates, it carries no information
                    continue
                bright, dim = sorted((_luminance(color), _luminance(background)), reverse=True)
                least = 3.0 if name.startswith("phase") else 4.5
                assert (bright + 0.05) / (dim + 0.05) >= least, (name, color, background)
