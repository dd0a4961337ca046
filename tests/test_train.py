"""Training: what moves images, what is repeated exactly, what is chosen by what, and what is written."""

import dataclasses
import hashlib
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import torch

import mnist_data
import mnist_files
import torch_model
import train_mnist
import training
import training_report
from harness.cli import Fault, parse_settings
from harness.paths import CONCLUSIONS, OUTPUT, ROOT

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = dataclasses.replace(training.RECIPES["default"], epochs=3, batch_size=20)
AVERAGED = dataclasses.replace(training.RECIPES["best"], epochs=3, batch_size=20, average_decay=0.5)
COMMAND = [sys.executable, str(ROOT / "scr" / "train_mnist.py")]


@pytest.fixture(scope="module")
def digits():
    return mnist_data.Digits(*mnist_files.blobs(60, 1), *mnist_files.blobs(20, 2), "blobs", {"files": "none"})


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    mnist_files.write_mnist(folder)
    return folder


def moving(**amounts):
    still = {"rotation_deg": 0, "scale": 0, "shear": 0, "shift_px": 0}
    return dataclasses.replace(training.RECIPES["best"], **{**still, **amounts})


def moved(image, uniform, **amounts):
    """`image` (28, 28) uint8 after the map that the numbers `uniform` (6) stand for, as pixels 0 to 255."""
    recipe = moving(**amounts)
    prepare = training.Preparation(torch.from_numpy(image[None]), recipe, channels_last=False)
    batch = prepare(torch.tensor([0]), training.affine(torch.tensor([uniform]), recipe))
    return (batch[0, 0].numpy() * mnist_data.STD + mnist_data.MEAN) * 255


@pytest.fixture(scope="module")
def image():
    picture = np.zeros((28, 28), np.uint8)
    picture[8:20, 10:14] = 200
    picture[8:11, 10:20] = 120
    return picture


def test_no_movement_is_the_identity(image):
    amounts = {"rotation_deg": 10, "scale": 0.1, "shear": 0.1, "shift_px": 2}
    assert np.allclose(moved(image, [0.0] * 6, **amounts), image, atol=0.01)


def test_shift_moves_by_pixels_and_brings_in_background(image):
    result = moved(image, [0.0, 0.0, 0.0, 0.0, 1.0, -0.5], shift_px=4)
    wanted = np.zeros_like(image)
    wanted[2:, :-4] = image[:-2, 4:]  # x to the left by 4, y down by 2
    assert np.allclose(result, wanted, atol=0.01)


def test_rotation_by_a_right_angle(image):
    result = moved(image, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0], rotation_deg=90)
    assert np.allclose(result, np.rot90(image, 1), atol=0.05)


def test_scale_and_shear_keep_the_centre(image):
    for uniform in ([0.0, 1.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]):
        maps = training.affine(torch.tensor([uniform]), moving(scale=0.2, shear=0.3))
        assert torch.equal(torch.tensor([0.0, 0.0, 1.0]) @ maps[0], torch.zeros(2))
    assert np.allclose(
        training.affine(torch.tensor([[0.0, 1, -1, 0, 0, 0]]), moving(scale=0.2))[0, 0, 0], 1.2
    )


def test_unmoved_batches_equal_the_normalised_images(digits):
    prepare = training.Preparation(torch.from_numpy(digits.train_images), None, channels_last=True)
    indices = torch.tensor([5, 0, 59])
    wanted = mnist_data.normalise(digits.train_images[[5, 0, 59]])
    assert np.allclose(prepare(indices).numpy(), wanted, atol=2e-6)
    assert not prepare.augments and prepare.draw(3, torch.Generator()) is None


def test_learning_rate_rises_then_falls_to_zero():
    recipe = dataclasses.replace(SMALL, warmup=0.1, learning_rate=2.0)
    rates = [training.learning_rate(recipe, step, 1000) for step in range(1001)]
    assert rates[0] < 0.1 and max(rates) == pytest.approx(2.0) and np.argmax(rates) == 100
    assert rates[550] == pytest.approx(1.0) and rates[1000] == pytest.approx(0.0)
    assert training.learning_rate(SMALL, 0, 10) == SMALL.learning_rate


def test_it_learns(tmp_path):
    digits = mnist_data.Digits(*mnist_files.blobs(480, 1), *mnist_files.blobs(100, 2), "blobs", {})
    run = training.train(SMALL, digits, training.Options(), tmp_path / "state.pth")
    losses = [epoch["train_loss"] for epoch in run.summary["history"]]
    assert losses[2] < losses[1] < losses[0]
    assert run.summary["test_accuracy"] > 0.8
    model = torch_model.model_from({n: v for n, v in run.state.items() if "num_batches" not in n})
    with torch.no_grad():
        answers = model(torch.from_numpy(mnist_data.normalise(digits.test_images))).argmax(1).numpy()
    assert (answers == digits.test_labels).mean() == run.summary["test_accuracy"]


@pytest.mark.parametrize("recipe", [SMALL, AVERAGED], ids=["default", "best"])
@pytest.mark.parametrize("stop_at", [2, 4, 8])  # of 3 steps per epoch: within the first, second, third
def test_resumed_training_ends_with_the_same_bits(digits, tmp_path, recipe, stop_at):
    path, options = tmp_path / "state.pth", training.Options(seed=7)
    whole = training.train(recipe, digits, options, tmp_path / "whole.pth")
    steps = 0

    def stop(read_loss):
        nonlocal steps
        steps += 1
        if steps == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.train(recipe, digits, options, path, tick=stop)
    assert path.exists() == (stop_at > 3)
    torch.manual_seed(123)  # a new process starts from another state
    resumed = training.train(recipe, digits, options, path, resume=path.exists())
    assert set(whole.state) == set(resumed.state)
    for name, value in whole.state.items():
        assert torch.equal(value, resumed.state[name]), name
    assert resumed.summary["best_epoch"] == whole.summary["best_epoch"]
    assert resumed.summary["confusion"] == whole.summary["confusion"]


def test_another_seed_gives_other_weights(digits, tmp_path):
    runs = [training.train(SMALL, digits, training.Options(seed=s), tmp_path / "state.pth") for s in (1, 2)]
    assert not torch.equal(runs[0].state["fc.weight"], runs[1].state["fc.weight"])


def test_resuming_another_training_is_refused(digits, tmp_path):
    path = tmp_path / "state.pth"
    training.train(SMALL, digits, training.Options(), path)
    for recipe, options, words in (
        (
            dataclasses.replace(SMALL, learning_rate=0.5),
            training.Options(),
            "learning_rate was 0.001, now 0.5",
        ),
        (SMALL, training.Options(seed=1), "seed was 42, now 1"),
    ):
        with pytest.raises(Fault, match=words):
            training.train(recipe, digits, options, path, resume=True)
    other = dataclasses.replace(digits, provenance={"files": "others"})
    with pytest.raises(Fault, match="data files was none, now others"):
        training.train(SMALL, other, training.Options(), path, resume=True)


def test_resuming_without_a_state_or_from_a_damaged_one_is_refused(digits, tmp_path):
    path = tmp_path / "state.pth"
    with pytest.raises(Fault, match="no unfinished training"):
        training.train(SMALL, digits, training.Options(), path, resume=True)
    path.write_bytes(b"PK" + bytes(99))
    with pytest.raises(Fault, match="damaged"):
        training.train(SMALL, digits, training.Options(), path, resume=True)


def test_validation_chooses_the_epoch_and_the_test_set_is_used_once(digits, tmp_path, monkeypatch):
    seen = []
    account = training.account_of_test
    monkeypatch.setattr(training, "account_of_test", lambda *a: seen.append(len(a[1])) or account(*a))
    scores = iter([(0.5, 0.7), (0.4, 0.9), (0.3, 0.9)])  # (loss, accuracy): the third wins by its loss
    monkeypatch.setattr(training, "evaluate", lambda *arguments: next(scores))
    run = training.train(SMALL, digits, training.Options(), tmp_path / "state.pth")
    assert run.summary["best_epoch"] == 3 and run.summary["validation_accuracy"] == 0.9
    assert seen == [20]
    monkeypatch.setattr(training, "evaluate", lambda *arguments: (0.5, 0.5))
    run = training.train(SMALL, digits, training.Options(test=False), tmp_path / "state.pth")
    assert run.summary["best_epoch"] == 1 and seen == [20]
    assert "test_accuracy" not in run.summary


def test_account_of_a_test_by_hand():
    logits = np.zeros((4, 10), np.float32)
    logits[[0, 1, 2, 3], [3, 3, 5, 0]] = [2, 1, 9, 9]
    images = np.arange(4 * 784).reshape(4, 28, 28).astype(np.uint8)
    account = training.account_of_test(logits, images, np.array([3, 4, 6, 0], np.uint8))
    assert account["test_accuracy"] == 0.5
    confusion = np.array(account["confusion"])
    assert confusion.sum() == 4 and confusion[3, 3] == confusion[4, 3] == confusion[6, 5] == 1
    first, second = account["mistakes"]
    assert (first["index"], first["label"], first["answer"]) == (2, 6, 5)
    assert first["confidence"] == pytest.approx(np.exp(9) / (np.exp(9) + 9))
    assert second["index"] == 1 and bytes.fromhex(second["pixels"]) == images[1].tobytes()


def test_values_that_are_not_finite_stop_training_with_the_layer(digits, tmp_path):
    exploding = dataclasses.replace(SMALL, optimizer="sgd", learning_rate=1e30)
    with pytest.raises(Fault, match=r"epoch 1 is not finite \(first bad layer: (conv1|stages)"):
        training.train(exploding, digits, training.Options(), tmp_path / "state.pth")
    assert not (tmp_path / "state.pth").exists()


def test_first_layer_that_is_not_finite_is_named():
    model = mnist_files.random_model()
    model.stages[2].pw.weight.data[3] = float("inf")
    with torch.no_grad():
        assert training.first_nonfinite_layer(model, torch.randn(1, 1, 28, 28)) == "stages.2.pw"
    assert not model.stages[2].pw._forward_hooks, "hooks were left behind"


def test_time_to_99_counts_everything_before():
    epochs = ((10.0, 0.98), (4.0, 0.99), (4.0, 0.999))
    trainer = types.SimpleNamespace(
        history=[
            {"seconds": seconds, "validation_seconds": 1.0, "validation_accuracy": accuracy}
            for seconds, accuracy in epochs
        ],
        labels=[0] * 80,
        steps_per_epoch=4,
        device=torch.device("cpu"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_preparation_ms", lambda trainer: 50.0)
        found = training.speed(trainer)
    assert (found["time_to_99_s"], found["epochs_to_99"], found["total_s"]) == (16.0, 2, 21.0)
    assert (found["images_per_s"], found["step_ms"], found["preparation_share"]) == (20.0, 1000.0, 0.05)


def test_device_that_is_not_there_is_refused():
    with pytest.raises(Fault, match=r"--device tpu is not available here; use one of .*cpu"):
        training.pick_device("tpu")
    assert training.pick_device("cpu").type == "cpu"


def settings(*words):
    return parse_settings(train_mnist.Settings, "", [str(word) for word in words])


@pytest.fixture
def subset(monkeypatch):
    """The packaged digits, cut down to 60 so that training takes no time."""
    whole = mnist_data._packaged()
    small = dataclasses.replace(
        whole,
        train_images=whole.train_images[:60],
        train_labels=whole.train_labels[:60],
        test_images=whole.test_images[:20],
        test_labels=whole.test_labels[:20],
    )
    monkeypatch.setattr(mnist_data, "_packaged", lambda: small)


def test_packaged_subset_is_named_on_screen_and_in_every_file(subset, tmp_path, capsys):
    output = tmp_path / "output"
    words = ("--data-dir", tmp_path / "none", "--no-download", "--output", output, "--device", "cpu")
    train_mnist.train(settings(*words, "--epochs", 1))
    train_mnist.speed(settings(*words, "--batch-size", 16, "--speed-limit", 0))
    captured = capsys.readouterr()
    assert captured.err.count("*** PACKAGED SUBSET") >= 2
    for name in ("best_model.json", "training_speed.json", "training.md"):
        assert "PACKAGED SUBSET" in (output / name).read_text(), name
    summary = training_report.read_json(output / "best_model.json")
    for draw in (
        training_report.draw_curves,
        training_report.draw_confusion,
        training_report.draw_mistakes,
    ):
        assert "PACKAGED SUBSET" in draw(summary).get_suptitle()


@pytest.fixture(scope="module")
def finished(data_dir, tmp_path_factory):
    """The command run to its end in a process of its own: (output folder, process)."""
    output = tmp_path_factory.mktemp("finished") / "output"
    words = ["--data-dir", data_dir, "--output", output, "--epochs", 4, "--batch-size", 10]
    process = subprocess.run([*COMMAND, *map(str, words)], capture_output=True, text=True, cwd="/")
    return output, process


def test_command_writes_everything_and_is_quiet(finished):
    output, process = finished
    assert process.returncode == 0, process.stderr
    assert process.stderr == "" and "\r" not in process.stdout
    assert process.stdout.strip().splitlines()[-1].startswith("test accuracy ")
    assert sorted(path.name for path in output.iterdir()) == [
        "best_model.json",
        "best_model.pth",
        "confusion_matrix.png",
        "mistakes.png",
        "training.md",
        "training_curves.png",
    ]
    text = (output / "best_model.json").read_text()
    assert str(ROOT) not in text and str(output.parent) not in text, "a machine's path is stored"
    summary = json.loads(text)
    digest = hashlib.sha256((output / "best_model.pth").read_bytes()).hexdigest()
    assert summary["checkpoint_sha256"] == digest
    assert len(summary["history"]) == 4 and summary["parameters"]["trainable"] == 101_098
    assert {"train_loss", "validation_accuracy", "learning_rate", "seconds"} <= set(summary["history"][0])
    state = torch.load(output / "best_model.pth", weights_only=True)
    assert type(state) is dict and all(value.device.type == "cpu" for value in state.values())


def test_pictures_and_report_come_back_identical(finished):
    output, _ = finished
    names = ("training_curves.png", "confusion_matrix.png", "mistakes.png", "training.md")
    before = {name: (output / name).read_bytes() for name in names}
    for name in names:
        (output / name).unlink()
    train_mnist.redraw(settings("--output", output))
    assert {name: (output / name).read_bytes() for name in names} == before


def test_a_killed_training_resumes_to_the_same_weights(finished, data_dir, tmp_path):
    output = tmp_path / "output"
    words = ["--data-dir", data_dir, "--output", output, "--epochs", 4, "--batch-size", 10]
    command = [*COMMAND, *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    state = output / "training_state.pth"
    start = time.monotonic()
    while not state.exists() and process.poll() is None and time.monotonic() - start < 60:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert state.exists() and not (output / "best_model.json").exists(), "the kill came too late to tell"
    subprocess.run([*command, "--resume"], check=True, stdout=subprocess.DEVNULL)
    assert not state.exists()
    wanted = torch.load(finished[0] / "best_model.pth", weights_only=True)
    found = torch.load(output / "best_model.pth", weights_only=True)
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())


def test_speed_entries_replace_those_of_the_same_case_only(data_dir, tmp_path):
    words = ["--data-dir", data_dir, "--output", tmp_path, "--batch-size", 10, "--device", "cpu"]
    elsewhere = dict.fromkeys(("versions", "data_source", "step_ms", "preparation_ms"), 0)
    elsewhere |= {"device": "another", "recipe": "default", "channels_last": True, "autocast": False}
    elsewhere |= {"images_per_s": 9.0, "time_to_99_s": 2.5, "epochs_to_99": 1, "preparation_share": 0.01}
    training_report.write_json(tmp_path / "training_speed.json", {"entries": [elsewhere]})
    for _ in range(2):
        train_mnist.speed(settings(*words, "--speed-limit", 0, "--epochs", 1))
    entries = training_report.read_json(tmp_path / "training_speed.json")["entries"]
    assert elsewhere in entries
    cases = [(entry["recipe"], entry["channels_last"]) for entry in entries if entry != elsewhere]
    assert cases == [("best", False), ("best", True), ("default", False), ("default", True)]
    assert "2.5 s (1 epochs)" in (tmp_path / "training.md").read_text()


def test_half_precision_is_added_to_the_account(finished, data_dir, tmp_path):
    for name in ("best_model.pth", "best_model.json"):
        shutil.copy(finished[0] / name, tmp_path)
    words = ["--data-dir", data_dir, "--output", tmp_path, "--half", "--device", "cpu"]
    train_mnist.half(settings(*words))
    summary = training_report.read_json(tmp_path / "best_model.json")
    entries = summary["half_precision"]["entries"]
    assert {entry["dtype"] for entry in entries} == {"float32", "float16", "bfloat16"}
    assert "## Half precision" in (tmp_path / "training.md").read_text()
    elsewhere = {**entries[0], "device": "another"}
    del summary["schema_version"]
    training_report.write_json(
        tmp_path / "best_model.json", {**summary, "half_precision": {"entries": [elsewhere, entries[0]]}}
    )
    train_mnist.half(settings(*words))
    merged = training_report.read_json(tmp_path / "best_model.json")["half_precision"]["entries"]
    assert merged == [elsewhere, *entries]
    training_report.write_json(tmp_path / "best_model.json", {**summary, "checkpoint_sha256": "another's"})
    with pytest.raises(Fault, match="of another checkpoint"):
        train_mnist.half(settings(*words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--study", "--redraw"), "--study and --redraw exclude each other"),
        (("--epochs", "0"), "--epochs must be at least 1"),
        (("--seed", "-1"), "--seed must be a whole number"),
        (("--output", __file__), "is no folder to write to"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(words, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_mnist.py", *words])
    with pytest.raises(Fault, match=message):
        train_mnist.main()


def test_study_keeps_the_best_checkpoint_and_resumes(data_dir, tmp_path):
    words = [
        "--data-dir",
        data_dir,
        "--output",
        tmp_path,
        "--epochs",
        1,
        "--batch-size",
        30,
        "--device",
        "cpu",
    ]
    train_mnist.study(settings(*words, "--study", "--seeds", 1, "--jobs", 2))
    study = training_report.read_json(tmp_path / "training_seeds.json")
    assert {(run["recipe"], run["seed"]) for run in study["runs"]} == {("default", 0), ("best", 0)}
    summary = training_report.read_json(tmp_path / "best_model.json")
    assert summary["recipe"]["name"] == "best"
    digest = hashlib.sha256((tmp_path / "best_model.pth").read_bytes()).hexdigest()
    assert summary["checkpoint_sha256"] == digest
    assert not (tmp_path / "study").exists()
    with pytest.raises(Fault, match="no unfinished study"):
        train_mnist.study(settings(*words, "--study", "--resume"))


def test_seed_statistics_by_hand():
    runs = [{"test_accuracy": a, "validation_accuracy": 0.5} for a in (0.9, 0.94, 0.98)]
    found = training_report.seed_statistics(runs)
    assert found["mean"] == pytest.approx(0.94) and found["sd"] == pytest.approx(0.04)
    assert (found["min"], found["max"], found["runs"]) == (0.9, 0.98, 3)
    assert training_report.seed_statistics(runs[:1])["sd"] is None


def test_search_ranks_by_validation_and_names_what_is_missing():
    recipe = dataclasses.asdict(SMALL)
    runs = [
        {"recipe": name, "seed": seed, "late_validation_accuracy": accuracy, "late_validation_loss": 0.1}
        for name, seed, accuracy in (("a", 0, 0.90), ("a", 1, 0.98), ("b", 0, 0.95))
    ]
    search = {
        "candidates": dict.fromkeys("abc", recipe),
        "runs": runs,
        "device": "x",
        "validation_images": 50,
    }
    scores = training_report.search_scores(search)
    assert list(scores) == ["b", "a"] and scores["a"]["accuracy"] == pytest.approx(0.94)
    text = "\n".join(training_report._search_part(search))
    assert "Stopped before these were done: `c`" in text and "2.00 %" in text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_bar_shows_loss_and_time_left(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    words = ["--data-dir", data_dir, "--output", tmp_path, "--epochs", 1, "--batch-size", 5]
    train_mnist.train(settings(*words, "--device", "cpu"))
    text = sys.stderr.getvalue()
    assert "loss=" in text and "11/11" in text
    assert re.search(r"\[\d\d:\d\d<\d\d:\d\d", text), "no time left"


def test_training_without_the_test_set_can_be_redrawn(data_dir, tmp_path):
    words = ["--data-dir", data_dir, "--output", tmp_path, "--epochs", 1, "--device", "cpu"]
    train_mnist.train(settings(*words, "--no-test"))
    assert "test_accuracy" not in training_report.read_json(tmp_path / "best_model.json")
    train_mnist.redraw(settings("--output", tmp_path))
    assert "The test set was not used." in (tmp_path / "training.md").read_text()


def test_folder_without_results_is_refused(tmp_path):
    with pytest.raises(Fault, match="holds no training results"):
        train_mnist.redraw(settings("--output", tmp_path, "--redraw"))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"schema_version": 1}', '{"a": 1}', '{"schema_version": 9}']
)
def test_damaged_results_are_refused(tmp_path, content):
    (tmp_path / "best_model.json").write_text(content)
    with pytest.raises(Fault, match=r"best_model\.json|partial or foreign"):
        training_report.write_report(tmp_path, tmp_path / "training.md")


def test_committed_report_is_what_the_committed_results_give(tmp_path):
    path = training_report.write_report(OUTPUT, tmp_path / "training.md")
    assert path.read_text() == (CONCLUSIONS / "training.md").read_text()


def test_committed_study_ran_the_recipes_of_the_code_and_reached_the_goal():
    study = training_report.read_json(OUTPUT / "training_seeds.json")
    assert study["recipes"] == {n: dataclasses.asdict(r) for n, r in training.RECIPES.items()}
    best = [run for run in study["runs"] if run["recipe"] == "best"]
    assert len(best) == 5 and training_report.seed_statistics(best)["mean"] >= training_report.GOAL
    summary = training_report.read_json(OUTPUT / "best_model.json")
    kept = max(best, key=lambda run: (run["validation_accuracy"], -run["validation_loss"]))
    assert (summary["options"]["seed"], summary["test_accuracy"]) == (kept["seed"], kept["test_accuracy"])
