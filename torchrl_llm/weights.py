"""Weight updates: the one place where the policies' weights and their version change.

An update is carried out by the thread that calls it, together with the threads that run the policies, and never by the
rollout: it works while idle, while another thread iterates, and after ``start()``. It goes over all policies in phases:
*stage* everywhere (checks; nothing is changed yet), *hold* everywhere (each policy rests between two of its steps),
*switch* everywhere, *release* everywhere, so that all policies of a collector change together.

Invariants: either all policies have the new weights, or none has, or those that failed are given up and answer nothing
any more; the version grows with every update that succeeded, and only then. A policy that is rebuilt gets the weights
to which at least one of them has switched, never those of an update that was refused or failed everywhere.

Threads: any may update, one at a time in the process, so that two collectors that share engines cannot wait for each
other. :meth:`PolicyWeights.restore` is called by the thread that rebuilds a policy.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torchrl_llm.changing import Changing
from torchrl_llm.errors import CollectorError, PolicyError
from torchrl_llm.kept_weights import KeptWeights, Sent
from torchrl_llm.policies.engine_owner import EngineOwner
from torchrl_llm.policies.hold import Hold, HoldEnded, refuse_owners
from torchrl_llm.policies.pool import PolicyPool
from torchrl_llm.policies.runner import Runner
from torchrl_llm.policies.weight_target import Switch, WeightTarget
from torchrl_llm.policies.weights_module import ModuleTarget
from torchrl_llm.policies.weights_vllm_reload import ReloadTarget
from torchrl_llm.sleep import Sleep
from torchrl_llm.weight_forms import Weights, read_weights
from torchrl_llm.weight_transports import Transport, VLLMTransfer

MODES = ("continue", "wait", "restart")

_updating = threading.RLock()


def check_mode(mode: Any) -> str:
    """``mode`` if it is an update mode.

    Raises:
        ValueError: if it is none.
    """
    if mode not in MODES:
        raise ValueError(f"update_mode={mode!r} is not allowed: pass 'continue', 'wait' or 'restart'")
    return str(mode)


def next_version(last: int, version: Any) -> int:
    """The number of the weights that follow those of ``last``: ``version``, or one more.

    Raises:
        TypeError: if ``version`` is no int.
        ValueError: if it is not greater than ``last``.

    Examples:
        >>> next_version(3, None), next_version(3, 10)
        (4, 10)
    """
    if version is None:
        return last + 1
    if not isinstance(version, int) or isinstance(version, bool):
        raise TypeError(f"version={version!r} is not allowed: pass an int, or None for {last + 1}")
    if version <= last:
        raise ValueError(f"version={version} is not allowed: versions grow, and the weights in use have {last}")
    return version


class PolicyWeights:
    """The weights of a collector's policies.

    Args:
        pool: the policies.
        mode: what becomes of the responses that are being made, unless an update says otherwise.
        keep: whether to keep a copy of the newest weights, for policies that are rebuilt.
        on_update: called after each update, with the new version.

    ``changing`` is held while the version changes, also by another collector that shares an engine.
    """

    def __init__(
        self,
        pool: PolicyPool,
        mode: str = "continue",
        keep: bool = False,
        on_update: Callable[[int], None] | None = None,
    ) -> None:
        self._pool = pool
        self._mode = check_mode(mode)
        self._keep = keep
        self._kept = KeptWeights()
        self._on_update = on_update
        self.changing = Changing(self._engine_owners)
        self._version = 0
        self._updates = 0
        self._seconds = 0.0
        self._sending = False
        self.transport: Transport | None = None
        self.asleep = Sleep(self._engines)
        pool.on_rebuild = self.restore

    @property
    def version(self) -> int:
        """Version of the weights: from 0, and that of the last update; also of one by a collector that shares them."""
        return max(self._version, self._pool.version)

    def update(
        self,
        source: Any,
        version: int | None = None,
        mode: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> int:
        """Gives all policies new weights; returns when each makes its next tokens with them.

        Args:
            source: see :func:`~torchrl_llm.weight_forms.read_weights`; whatever the user's own transport takes.
            version: number of the new weights; by default one more than the last.
            mode: ``"continue"``, ``"wait"`` or ``"restart"``; by default the collector's.
            arguments: what else the user's own transport takes.

        Returns:
            The version.

        Raises:
            ValueError: if the weights do not fit (the first mismatches are listed, and nothing is changed), or
                ``version`` is not greater than the last.
            TypeError: if the weights have none of the allowed forms, or a policy has no weights.
            PolicyError: if a policy failed while it switched; it is given up.
            CollectorError: if the engines sleep, or have no weights to which an adapter could be added.
            RuntimeError: in a policy's own thread, which would wait for itself.
        """
        refuse_owners()
        mode = self._mode if mode is None else check_mode(mode)
        begun = time.monotonic()
        with _updating:
            self.asleep.check_can_update()
            new = next_version(self.version, version)
            if self.transport is None:
                if source is None or any(value is not None for value in (arguments or {}).values()):
                    raise TypeError(
                        "update_policy_weights_ needs weights, and no worker_ids, model_id or weights_dict: "
                        "the collector has no weight_updater= and no weight_sync_schemes="
                    )
                self._switch_all(read_weights(source), new, mode)
            else:
                self.transport.check(source, arguments or {})
                kept = self._kept.sent_by(source, arguments or {}) if self._keep else self._kept
                self._send_to_all(self.transport, [(source, arguments or {})], new, mode, kept)
            self._updates += 1
            self.asleep.pushed()
            self._seconds += time.monotonic() - begun
            if self._on_update is not None:
                self._on_update(new)
        return new

    def increment(self) -> None:
        """What TorchRL's updaters call when they have pushed weights; an update of ours counts it itself.

        Raises:
            CollectorError: outside of an update, where nothing holds the engines still.
        """
        if not self._sending:
            raise CollectorError("push weights by collector.update_policy_weights_(), which lets the policies rest")

    def sleep(self, level: int) -> None:
        """See :meth:`Sleep.sleep`."""
        refuse_owners()
        with _updating:
            self.asleep.sleep(level)

    def wake_up(self) -> None:
        """See :meth:`Sleep.wake_up`."""
        refuse_owners()
        with _updating:
            self.asleep.wake_up()

    def count_from(self, version: int) -> None:
        """Goes on counting from the version of a saved state, before anything is read."""
        with self.changing:
            self._version = max(self.version, version)
            self._pool.restore_version(self._version)

    def _switch_all(self, weights: Weights, version: int, mode: str) -> None:
        if weights.adapter:
            self.asleep.check_has_weights()
        targets = self._targets()
        try:
            staged = [(target, target.stage(weights)) for target in targets]
            kept = self._kept.followed_by(weights) if self._keep else self._kept
            self._switch_together(staged, version, mode, kept)
        finally:
            for target in targets:
                target.dispose()
            weights.dispose()

    def _send_to_all(self, transport: Transport, sends: list[Sent], version: int, mode: str, kept: KeptWeights) -> None:
        """Lets the user's transport change the weights of all policies while they rest."""
        targets = self._targets()

        def send() -> None:
            for source, arguments in sends:
                transport.send(source, arguments)

        if isinstance(transport, VLLMTransfer):
            transport.engines = [target.engine for target in targets if isinstance(target, ReloadTarget)]
        self._sending = True
        try:
            staged: list[tuple[WeightTarget, Switch]] = [(target, target.refreshed) for target in targets]
            self._switch_together(staged, version, mode, kept, send)
        finally:
            self._sending = False
            if isinstance(transport, VLLMTransfer):
                transport.engines = []

    def _targets(self) -> list[WeightTarget]:
        """What is to be switched, each owner once; policies that are gone are rebuilt, and get the newest weights then.

        The runners of other collectors that have the same module are among them, and so is a callable without weights:
        it rests with the others, and its version is theirs.
        """
        shared: list[WeightTarget] = []
        for target in self._own_targets():
            shared += target.all_with_the_module() if isinstance(target, ModuleTarget) else [target]
        return _each_owner_once(shared)

    def _own_targets(self) -> list[WeightTarget]:
        """Those of the collector's own runners; all engines are among them."""
        targets = [runner.weight_target() for runner in self._pool.runners]
        return _each_owner_once([target for target in targets if target is not None])

    def _engines(self) -> list[Any]:
        """The targets that can sleep."""
        return [target for target in self._own_targets() if hasattr(target, "sleep")]

    def _engine_owners(self) -> list[EngineOwner]:
        owners = [target.owner for target in self._own_targets()]
        return [owner for owner in owners if isinstance(owner, EngineOwner)]

    def restore(self, runner: Runner) -> None:
        """Gives a policy that was rebuilt the newest weights and their version, before it answers anything.

        A transport of the user's is called again with what it was given last; all policies rest meanwhile.

        Raises:
            PolicyError: if they cannot be had again, or the switch failed.
        """
        with _updating:
            version = self.version
            runner.restore_version(version)
            if self.transport is not None:
                if self._kept.sent:
                    self._send_to_all(self.transport, self._kept.to_send_again(), version, self._mode, self._kept)
                return
            target = runner.weight_target()
            with self._kept.parts() as parts:
                if target is None or not parts:
                    return
                try:
                    switch = _one_after_the_other([target.stage(part) for part in parts])
                    self._switch_together([(target, switch)], version, self._mode, self._kept)
                finally:
                    target.dispose()

    def _switch_together(
        self,
        staged: list[tuple[WeightTarget, Switch]],
        version: int,
        mode: str,
        kept: KeptWeights,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Holds all targets, calls ``before``, switches all, releases all; keeps ``kept`` if anything has switched.

        Raises:
            PolicyError: if a switch failed; what failed is given up.
        """
        holds: list[Hold] = []
        try:
            resting = []
            for target, switch in staged:
                held = self.asleep.held(target)
                hold = held if held is not None else target.hold(mode)
                if held is None:
                    holds.append(hold)
                resting.append((target, switch, hold))
            # What died, or was closed, on the way makes no more tokens.
            resting = [one for one in resting if _at_rest(one[2])]
            with self.changing:
                failed = _switch_resting(resting, version, before)
                if not failed:
                    self._version = version
                if not failed or len(failed) < len(resting):
                    self._kept = kept
        finally:
            for hold in holds:
                hold.release()
        if failed:
            raise _half_way(version, resting, failed)

    def stats(self) -> dict[str, Any]:
        """``policy_version``, ``weight_updates``, the seconds that they took, and the tokens that restarts cost."""
        return {
            "policy_version": self.version,
            "weight_updates": self._updates,
            "weight_update_seconds": self._seconds,
            "tokens_discarded": self._pool.tokens_discarded,
        }


def _each_owner_once(targets: list[WeightTarget]) -> list[WeightTarget]:
    found: dict[int, WeightTarget] = {}
    for target in targets:
        if not target.gone:
            found.setdefault(id(target.owner), target)
    return list(found.values())


def _switch_resting(
    resting: list[tuple[WeightTarget, Switch, Hold]], version: int, before: Callable[[], None] | None
) -> list[tuple[WeightTarget, Exception]]:
    """Switches targets in their resting owners; gives up those that fail, and returns them with their errors."""
    try:
        if before is not None:
            before()
    except Exception as error:
        if not resting:
            raise
        for target, _, hold in resting:
            _give_up(target, hold, error)
        return [(target, error) for target, _, _ in resting]
    failed = []
    for target, switch, hold in resting:
        try:
            hold.run(lambda switch=switch: switch(version))  # type: ignore[misc]
        except HoldEnded:
            continue  # It slept, and was closed on the way.
        except Exception as error:
            _give_up(target, hold, error)
            failed.append((target, error))
    return failed


def _one_after_the_other(switches: list[Switch]) -> Switch:
    def switch(version: int) -> None:
        for one in switches:
            one(version)

    return switch


def _give_up(target: WeightTarget, hold: Hold, error: Exception) -> None:
    with contextlib.suppress(HoldEnded):
        hold.run(lambda: target.fail(error))


def _half_way(
    version: int,
    resting: list[tuple[WeightTarget, Switch, Hold]],
    failed: list[tuple[WeightTarget, Exception]],
) -> PolicyError:
    names = ", ".join(f"{target.name} ({type(error).__name__}: {error})" for target, error in failed)
    gone = [target for target, _ in failed]
    others = ", ".join(target.name for target, _, _ in resting if target not in gone) or "none"
    failure = PolicyError(
        f"the switch to version {version} failed half way in {names}, which is given up; with the new weights: {others}"
    )
    failure.__cause__ = failed[0][1]
    return failure


def _at_rest(hold: Hold) -> bool:
    try:
        hold.wait()
    except Exception:
        return False
    return True
