"""Mutants of what clients do for those who write."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

OF_CLIENTS = (
    Mutant(
        "send a batch anew after any gap",
        "client/writers.py",
        'if writer.sent_again or "acknowledged" in e.context:',
        "if False:",
        "tests/unit/client/test_batch_writer.py",
    ),
    Mutant(
        "tell of several callers' rows the first one's offsets",
        "client/small_appends.py",
        "np.searchsorted(positions, bounds)",
        "np.minimum(bounds, len(positions))",
        "tests/unit/client/test_small_appends.py",
    ),
    Mutant(
        "send what may have landed once more for each caller",
        "client/small_appends.py",
        "elif _of_all(e):",
        "elif False:",
        "tests/unit/client/test_small_appends.py",
    ),
    Mutant(
        "lose progress that comes while a stream is sent to",
        "server/deliveries.py",
        "                self._again = True\n",
        "                pass\n",
        "tests/unit/server/test_deliveries.py",
    ),
    Mutant(
        "let a writer's thread wait for a client that does not read",
        "server/deliveries.py",
        "connection.sendmsg(parts, (), socket.MSG_DONTWAIT)",
        "connection.sendmsg(parts)",
        "tests/unit/server/test_deliveries.py",
    ),
    Mutant(
        "forget what a client did not take",
        "server/deliveries.py",
        "                    self._unsent = outgoing\n",
        "",
        "tests/unit/server/test_deliveries.py",
    ),
    Mutant(
        "ask who holds pins whenever a read ends",
        "client/leases.py",
        "self.renew() if due else self._tell()",
        "self.renew()",
        "tests/unit/client/test_leases.py",
    ),
    Mutant(
        "load what a lone worker of Spark needs before it connects",
        "spark/own_python.py",
        'if [ "$1" = -m ] && [ -n',
        "if false && [ -n",
        "tests/unit/spark/test_lone_worker.py",
    ),
    Mutant(
        "tell each part what is acknowledged by now",
        "client/batch_writer.py",
        "sequence, previous, acked_through, self._epoch",
        "sequence, previous, self.acked_through, self._epoch",
        "tests/unit/client/test_batch_writer.py",
    ),
    Mutant(
        "send what follows a request that failed",
        "api/writer.py",
        "        if self.error is None:\n            self._send(write, group)\n",
        "        self._send(write, group)\n",
        "tests/unit/api/test_writer.py",
    ),
    Mutant(
        "drain released leases as if nobody else did",
        "client/leases.py",
        "            while True:\n                released.append(self._released.popleft())\n",
        "            released += [self._released.popleft() for _ in range(len(self._released))]\n",
        "tests/unit/client/test_leases.py",
    ),
    Mutant(
        "give functions what was attached to their address last",
        "spark/connections.py",
        """    return f"{con.uri}#{number}"\n""",
        """    return f"{con.uri}#{number}".partition("#")[0]\n""",
        "tests/unit/spark/test_connections.py",
    ),
)
