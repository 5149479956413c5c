"""Versions and hardware: present, and not in the way where a system does not tell."""

from foredraft.measure import machine


def test_versions_of_what_is_installed_and_of_what_is_not(monkeypatch):
    monkeypatch.setattr(machine, "PACKAGES", ("torch", "no-such-package"))
    found = machine.versions()
    assert found["torch"].startswith("2.")
    assert found["no-such-package"] == "not installed"
    assert found["python"].count(".") == 2


def test_the_processor_is_named():
    found = machine.cpu()
    assert found["cpu"]
    assert found["cores"] >= 1
    assert set(found["cpu_features"]) <= set(machine.CPU_FEATURES)


def test_a_system_that_tells_nothing(monkeypatch):
    def refuse(name):
        raise ValueError(name)

    monkeypatch.setattr(machine, "_cpuinfo", dict)
    monkeypatch.setattr(machine.os, "sysconf", refuse)
    found = machine.cpu()
    assert found["cpu"]
    assert found["cpu_features"] == []
    assert found["memory_bytes"] is None
