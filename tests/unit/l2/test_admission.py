from __future__ import annotations

from pathlib import Path

from kvpersist_l2.admission import SAVE_S, SecondHit

from .harness import key

DAY = 86_400
NOW = 20_000 * DAY + 100.0


def test_the_second_offer_within_the_window_is_admitted(tmp_path: Path) -> None:
    sketch = SecondHit(str(tmp_path), DAY, NOW)
    assert not sketch.admits(key(1), NOW)
    assert sketch.admits(key(1), NOW + 1)
    assert not sketch.admits(key(2), NOW)
    assert sketch.admits(key(2), NOW + DAY // 2)
    assert not sketch.admits(key(3), NOW)
    assert not sketch.admits(key(3), NOW + DAY)


def test_what_was_offered_survives_a_restart(tmp_path: Path) -> None:
    sketch = SecondHit(str(tmp_path), DAY, NOW)
    sketch.admits(key(1), NOW)
    sketch.save(NOW + 30)
    assert not list(tmp_path.iterdir()), "not at each heartbeat"
    sketch.save(NOW + SAVE_S)
    assert SecondHit(str(tmp_path), DAY, NOW + SAVE_S).admits(key(1), NOW + SAVE_S)
    later = NOW + DAY // 2
    assert SecondHit(str(tmp_path), DAY, later).admits(key(1), later)
    assert not SecondHit(str(tmp_path), DAY, NOW + DAY).admits(key(1), NOW + DAY)
    assert not SecondHit(str(tmp_path), 2 * DAY, NOW).admits(key(1), NOW), "another window remembers differently"


def test_closing_saves_and_a_damaged_sketch_is_forgotten(tmp_path: Path) -> None:
    sketch = SecondHit(str(tmp_path), DAY, NOW)
    sketch.admits(key(1), NOW)
    sketch.save(NOW, is_last=True)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_bytes(file.read_bytes()[:-1])
    assert not SecondHit(str(tmp_path), DAY, NOW).admits(key(1), NOW)


def test_few_of_many_are_taken_for_others(tmp_path: Path) -> None:
    sketch = SecondHit(str(tmp_path), DAY, NOW)
    assert sum(sketch.admits(key(number), NOW) for number in range(100_000)) < 100
