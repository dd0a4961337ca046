"""What is said about the machine, from recorded outputs of macOS's tools and from this machine."""

import json

import pytest

from harness import machine

PMSET_BATTERY = """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=1234) 87%; discharging; 5:12 remaining present: true"""
PMSET = """Currently in use:
 standby              1
 lowpowermode         1
 sleep                1"""
DISPLAYS = json.dumps({"SPDisplaysDataType": [{"sppci_model": "Apple M1", "sppci_cores": "8"}]})


@pytest.mark.parametrize(
    ("chip", "figures"),
    [
        ("Apple M1", (8, 2.66, 68.0, 39.1)),
        ("Apple M1 Max", (32, 10.6, 400.0, 27)),
        ("Apple M2 Ultra", (76, 27.2, 800.0, 34)),
        ("Apple M3 Pro", (18, 6.4, 150.0, 43)),
        ("Apple M4", (10, 3.8, 120.0, 31)),
        ("Apple M5 Max", (40, 16.6, 614.0, 27)),
    ],
)
def test_datasheet(chip, figures):
    sheet = machine.datasheet(chip)
    assert (sheet["gpu_cores"], sheet["fp32_tflop_s"], sheet["gb_s"]) == figures[:3]
    assert sheet["ridge_flop_per_byte"] == pytest.approx(figures[3], abs=0.75)


@pytest.mark.parametrize("chip", ["AMD EPYC", "Apple M9 Max", "Apple A17", "Intel M1", ""])
def test_no_datasheet_for_other_chips(chip):
    assert machine.datasheet(chip) is None


def test_power_state():
    assert machine.parse_pmset(PMSET_BATTERY, PMSET) == {"source": "battery", "low_power_mode": True}
    mains = machine.parse_pmset("Now drawing from 'AC Power'", PMSET.replace("mode         1", "mode 0"))
    assert mains == {"source": "mains", "low_power_mode": False}
    assert machine.parse_pmset("", "") == {"source": None, "low_power_mode": None}


def test_gpu_of_a_mac():
    assert machine.parse_displays(DISPLAYS) == {"name": "Apple M1", "cores": 8}
    assert machine.parse_displays("") is None
    assert machine.parse_displays("{}") is None


def test_warnings():
    quiet = {"source": "mains", "low_power_mode": False}
    assert machine.warnings(quiet, [0.1, 0.1, 0.1], 8) == []
    assert machine.warnings({"source": None, "low_power_mode": None}, [0.4, 2.0, 2.0], 2) == []
    found = machine.warnings({"source": "battery", "low_power_mode": True}, [3.0, 0.0, 0.0], 8)
    assert all(word in line for word, line in zip(("battery", "Low-power", "3.0 on 8"), found, strict=True))


def test_the_command_holds_no_path_of_this_machine(tmp_path):
    command = machine.command_line(
        ["/somewhere/else/benchmark.py", "--checkpoint", str(tmp_path / "a.pth"), "--x", "1"]
    )
    assert command == "python benchmark.py --checkpoint a.pth --x 1"


def test_description_of_this_machine():
    facts = machine.describe(["benchmark.py"], threads=3)
    json.dumps(facts, allow_nan=False)
    assert facts["chip"] and facts["cores"] >= 1 and facts["memory_gb"] > 0.1
    assert facts["threads"] == 3 and facts["versions"]["numpy"]
    assert set(facts["kernel_hashes"]) >= {"dw_bn_relu.metal", "prelude_host.h"}
    assert all(len(value) == 12 for value in facts["kernel_hashes"].values())
    assert str(machine.ROOT) not in json.dumps(facts)


def test_a_tool_that_is_missing_or_fails_gives_nothing():
    assert machine._output("no-such-tool") == ""
    assert machine._output("false") == ""
