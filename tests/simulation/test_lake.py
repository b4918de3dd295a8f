"""The simulated lake: what a reader was told stays until it lets go, whatever others do."""

from __future__ import annotations

import pytest
from tests.lakes import describe
from tests.simulation.disk import Disk
from tests.simulation.history import History
from tests.simulation.lake import SimulatedLake, SimulatedLakes
from tests.simulation.scheduler import Process, Scheduler

from lakehead.env.randomness import SeededRandomness
from lakehead.errors import LakeFileMissingError
from lakehead.predicate.read_spec import ReadSpec

DISTURBANCES = 60


@pytest.mark.parametrize("seed", range(5))
def test_others_leave_what_a_reader_was_told(seed: int) -> None:
    scheduler, desc = Scheduler(seed), describe(keyed=False)
    history = History(
        Disk(scheduler, lambda *a: None, lambda p: None, lambda p: None), lambda _: {}, lambda _: {}, lambda _: {}
    )
    lakes = SimulatedLakes(lambda desc: SimulatedLake(scheduler, history, desc, SeededRandomness(seed)))
    lakes.create(desc)
    lake = lakes.by_table[desc.table_id]

    def disturb() -> None:
        done = [lake.disturb() for _ in range(DISTURBANCES)]
        assert {"compact", "expire", "orphans"} <= set(done)

    def main() -> None:
        lake.table.append_foreign([{"id": i, "code": i, "v": 0} for i in range(3)])
        view = lakes.at(desc, lakes.info(desc), None)
        other = scheduler.spawn("engine", Process("engine"), disturb)
        while not other.done:
            scheduler.sleep(0.1)
        spec = ReadSpec(("id",))
        assert sum(b.num_rows for b in view.read(view.plan(), spec)) == 3
        assert view.snapshot_id not in lake.table.snapshot_ids()
        lake.release()
        disturb()
        with pytest.raises(LakeFileMissingError):
            view.plan()

    scheduler.run(main)
