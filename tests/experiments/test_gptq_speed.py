from experiments import gptq_speed, harness


def test_a_small_matrix(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gptq_speed, "append", lambda record: harness.append(record, tmp_path))
    sizes = ["--rows", "24", "--columns", "64", "--group", "32", "--calibration-rows", "100", "--repeats", "2"]
    gptq_speed.main([*sizes, "--act-order"])
    [record] = harness.read_records(tmp_path / "gptq_speed.jsonl")
    assert record["weights"] == "random" and record["settings"]["act_order"] is True
    assert record["results"]["gptq"]["median_ms"] > 0 and record["results"]["gptq"]["repeats"] == 2
    assert 0 < record["results"]["peak_gib"] < 64 and 0 < record["results"]["output_error"] < 0.3
    assert "random weights" in capsys.readouterr().out
