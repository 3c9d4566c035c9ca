"""`edgegossip plan --live`: the machines that join measure themselves, and the winner starts.

Importing this module imports torch.
"""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgegossip.cli.command import Command, parse_values
from edgegossip.cli.invite_command import (
    Service,
    ServiceOptions,
    has_service_lock,
    members_of,
    serve,
)
from edgegossip.cli.plan_command import PlanOptions, parse_plan
from edgegossip.cli.study_command import carry_out
from edgegossip.contract.errors import NetworkError, UsageError
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_ranges
from edgegossip.machine.files import write_whole
from edgegossip.net.identity.enrollment import Json
from edgegossip.net.identity.members import Member
from edgegossip.plan.candidates import Proposal, candidates
from edgegossip.plan.machines import machines_text
from edgegossip.plan.planning import BudgetError, Plan, proposals_of
from edgegossip.plan.ranking import Outlook, no_winner, ranked
from edgegossip.plan.results import chosen, print_ranking, ranking_rows, recommendation
from edgegossip.plan.survey import Survey, Surveyor, confidence
from edgegossip.recipes.call import RecipeCall, option_words
from edgegossip.report import units
from edgegossip.runs.process import on_stop_signal

BUDGET = "60s"
"""Budget of a live plan if none is given, or as much more as its runs need."""
_LOOK: Seconds = 0.2


@dataclass(frozen=True, kw_only=True)
class LivePlanOptions(ServiceOptions, PlanOptions):
    """Let machines that join measure themselves, plan for them, and start the winner.

    This machine invites the others, like `edgegossip invite`; to train as well, it joins by an
    invitation of its own. The recipe's --num-workers is the number of machines to wait for.

    Args:
        machines: TOML file to write, with a [[machine]] table for each machine; by default
            RUN.toml.
        wait: Seconds to wait for machines; then those that are there are measured.
        work_seconds: Seconds for which all machines train together to measure what samples,
            trainings and messages cost them.
        yes: Start the winner without a question.
    """

    wait: Seconds = 600.0
    work_seconds: Seconds = 10.0
    yes: bool = False

    def __post_init__(self) -> None:
        ServiceOptions.__post_init__(self)
        PlanOptions.__post_init__(self)
        check_ranges(self, wait="above 0 and finite", work_seconds="in [0.5, 60]")
        if self.resume:
            raise ValueError(
                "a live plan cannot be resumed, because it has measured anew; resume with "
                "--machines FILE.toml, the file that it wrote, instead of --live"
            )


@dataclass
class _Desk:
    """The survey, shared by the threads of the signing service and the one that plans.

    Args:
        surveyor: The survey.
    """

    surveyor: Surveyor
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, member: Member, said: Json) -> Json:
        """Answer a machine; see `Surveyor.asked`."""
        with self._lock:
            return self.surveyor.asked(member.rank, member.name, said, time.monotonic())

    def look(self, *, begin: bool = False) -> str:
        """Notice silence, print news, and return the phase of the survey."""
        with self._lock:
            now = time.monotonic()
            if begin:
                self.surveyor.begin(now)
            self.surveyor.tick(now)
            news, self.surveyor.news = self.surveyor.news, []
        for line in news:
            print(line, flush=True)
        return self.surveyor.phase


def live_plan_command(arguments: list[str]) -> int:
    """`edgegossip plan --live`."""
    command = parse_values("plan", LivePlanOptions, arguments)
    options = command.options
    if not options.yes and not sys.stdin.isatty():
        raise UsageError(
            "plan --live asks before it starts the winner, and standard input is no terminal; "
            "add --yes to start it without a question"
        )
    experiment = command.call.experiment()
    # A recipe or a value that does not fit would otherwise be found when all have joined.
    _, every = candidates(command.call, command.values, experiment.num_workers)
    proposals_of(every, options.only)
    members = members_of(options, command.call)
    with ExitStack() as stack:
        if not has_service_lock(members, stack):
            raise NetworkError(
                f"run {members.run!r} has a signing service already; end the other "
                "`edgegossip invite` or `plan --live`, or choose another --name"
            )
        desk = _Desk(Surveyor(options.work_seconds))
        service = serve(
            options,
            members,
            command.call.words(),
            experiment.num_workers,
            stack,
            plans=desk.answer,
        )
        desk.surveyor.digest = service.signing.offer.digest
        return _plan(command, service, desk)


def _plan(command: Command[LivePlanOptions, RecipeCall], service: Service, desk: _Desk) -> int:
    options, run = command.options, service.members.run
    print(f"{service.announcement}")
    _invite(service)
    _gather(service, desk, options.wait)
    began = time.monotonic()
    survey = _measure(desk)
    file = options.machines or Path(f"{run}.toml")
    notes = [f"variation: {note}" for note in survey.notes]
    write_whole(file, machines_text(survey.machines, notes).encode())
    _print_survey(survey)
    print(f"measured in {time.monotonic() - began:.0f} s; machines: {file}", flush=True)
    plan, target, order = _ranked(command, file)
    print_ranking(order, target)
    for line in recommendation(target, order, plan.proposals):
        print(line)
    print(f"{confidence(order, survey)}\nplanned in {time.monotonic() - began:.0f} s")
    desk.look()
    if gone := survey.names.keys() - desk.surveyor.present.keys():
        reason = f"{survey.names[min(gone)]} was lost while the plan was made"
        desk.surveyor.end(reason)
        raise NetworkError(f"{reason}; repeat the command, and let the others join again")
    return _start(command, service, desk, chosen(order, plan.proposals), plan, order)


def _invite(service: Service) -> None:
    """Print an invitation for each machine that has not joined yet."""
    offer = service.signing.offer
    joined = sum(each.state == "member" for each in service.members.rows())
    if joined:
        print(f"{joined} machines are members; they go on with: edgegossip join --out DIR")
    if (number := offer.num_workers - joined) > 0:
        print(f"\none line for each machine, within {service.options.minutes:g} minutes:\n")
        for _ in range(number):
            print(f"  edgegossip join {service.invite()}")
        print(flush=True)


def _gather(service: Service, desk: _Desk, seconds: Seconds) -> None:
    """Wait until all machines are there, or for `seconds`.

    Raises:
        NetworkError: If fewer than two are there in the end.
    """
    limit, end = service.signing.offer.num_workers, time.monotonic() + seconds
    while len(desk.surveyor.present) < limit and time.monotonic() < end:
        desk.look()
        time.sleep(_LOOK)
    desk.look()
    found = desk.surveyor.present
    if len(found) < 2:
        who = " and ".join(found.values()) or "no machine"
        desk.surveyor.end("too few machines have joined")
        raise NetworkError(
            f"within {seconds:g} s, {who} alone has joined, and a plan needs two machines; "
            "run `edgegossip join` with a line from above on each, or raise --wait"
            if found
            else f"no machine has joined within {seconds:g} s; run `edgegossip join` with a "
            "line from above on each, or raise --wait"
        )
    if len(found) < limit:
        print(f"{len(found)} of {limit} machines have joined; going on with these")


def _measure(desk: _Desk) -> Survey:
    """Measure all that are present.

    Raises:
        NetworkError: If fewer than two machines are left.
    """
    phase = desk.look(begin=True)
    seen = ""
    while phase != "measured":
        if phase != seen:
            print(f"measuring {phase} of {len(desk.surveyor.present)} machines", flush=True)
        seen = phase
        time.sleep(_LOOK)
        phase = desk.look()
    try:
        return desk.surveyor.survey()
    except NetworkError as error:
        desk.surveyor.end(str(error))
        raise


def _print_survey(survey: Survey) -> None:
    """Print what was measured, and how much it varied."""
    table = Table(box=None, padding=(0, 1))
    columns = (
        *("machine", "samples/s", "a training", "a message", "a MB"),
        *("Mbit/s", "latency", "variation"),
    )
    for column in columns:
        table.add_column(
            column, justify="left" if column in ("machine", "variation") else "right"
        )
    for machine, note in zip(survey.machines, survey.notes, strict=True):
        table.add_row(
            escape(machine.name),
            units.number(machine.samples_per_second or 0.0),
            f"{machine.ms_per_training:.3g} ms",
            f"{machine.ms_per_message:.3g} ms",
            f"{machine.ms_per_mb:.3g} ms",
            units.number(machine.mbits),
            f"{machine.latency_ms:.3g} ms",
            note,
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(
        f"latencies of pairs differ from the sums of two machines' by up to "
        f"{1000 * survey.misfit:.2g} ms"
    )


def _ranked(
    command: Command[LivePlanOptions, RecipeCall], file: Path
) -> tuple[Plan, float, list[Outlook]]:
    """Plan for the machines in `file`, by the same command without `--live`."""
    own = {each.name for each in fields(PlanOptions)} - {"live"}
    left_out = {each.name for each in fields(LivePlanOptions)} - own

    def planned_for(budget: str) -> tuple[Command[PlanOptions, RecipeCall], Plan]:
        return parse_plan(command.words(*left_out, machines=file, budget=budget)[1:])

    try:
        planned, plan = planned_for(command.options.budget or BUDGET)
    except BudgetError as error:
        if command.options.budget is not None:
            raise
        print(f"{error}; meanwhile, this plan does without tuning", flush=True)
        planned, plan = planned_for(error.least)
    print(plan.announcement, flush=True)
    rows = carry_out(plan.study, planned)
    target, order = ranked(ranking_rows(rows), command.options.target)
    return plan, target, order


def _start(
    command: Command[LivePlanOptions, RecipeCall],
    service: Service,
    desk: _Desk,
    best: Proposal,
    plan: Plan,
    order: Sequence[Outlook],
) -> int:
    """Start the winner if there is one and the person agrees; serve the run until Ctrl+C."""
    why, seconds = no_winner(order), plan.fleet.seconds
    question = f"start {best.label} on {len(plan.fleet.machines)} machines, for "
    if why is None and not command.options.yes:
        said = input(f"{question}{units.seconds(seconds)}? [y/N] ")
        why = None if said.strip().lower() in ("y", "yes") else "the answer was no"
    if why is not None:
        desk.surveyor.end(why)
        print(f"nothing is started: {why}")
        time.sleep(2.0)  # the machines ask several times a second
        return 1
    words = _words(best, seconds, service)
    # A plan's ranks have no gaps: those after a lost machine move up.
    ranks = {rank: place for place, rank in enumerate(sorted(desk.surveyor.present))}
    num_workers = len(ranks)
    service.members.renumber(ranks)
    service.signing.offer = replace(
        service.signing.offer, words=words, num_workers=num_workers, kind="planned"
    )
    stop = threading.Event()
    with on_stop_signal(stop.set):
        desk.surveyor.decide(ranks, {"words": words, "num_workers": num_workers})
        again = shlex.join([best.call.name, *words[1:], "--name", service.members.run])
        print(
            f"started: {best.label} on {num_workers} machines\n"
            "this machine connects them until Ctrl+C; to connect them again later:\n"
            f"  edgegossip invite {again}",
            flush=True,
        )
        stop.wait()
    return 0


def _words(best: Proposal, seconds: Seconds, service: Service) -> tuple[str, ...]:
    """The recipe and all that the plan has chosen, as in an offer."""
    call = best.lasting(seconds)
    limit = [] if "seconds" in call.defaults else option_words("max_seconds", seconds)
    name = service.signing.offer.words[0]
    return (name, *call.words()[1:], *option_words("only", best.only), *limit)
