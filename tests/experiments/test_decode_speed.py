import pytest

from experiments import decode_speed
from tests.models import SMALL


def test_compile_times_come_from_shapes_alone():
    cfg = decode_speed.with_groups(SMALL, 1)
    assert (cfg.num_groups, cfg.num_hidden_layers) == (1, 2)
    record = decode_speed.compile_record(cfg, repeats=1)
    results = record["results"]
    for name in ("step", "prefill"):
        parts = results[f"{name}_lowering"]["median_ms"] + results[f"{name}_xla"]["median_ms"]
        assert results[f"{name}_compile_seconds"] == pytest.approx(parts / 1000)
    assert record["weights"] == "random" and record["settings"]["groups"] == 1
    assert record["ms_per_step"] is None


@pytest.mark.parametrize("arguments", [["--checkpoint", "x"], ["--weights", "random"], ["--new-tokens", "1"]])
def test_arguments_that_make_no_measurement(arguments, capsys):
    with pytest.raises(SystemExit):
        decode_speed.main(arguments)
    assert "error" in capsys.readouterr().err
