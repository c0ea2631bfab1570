"""The live view of a beam search; needs rich."""

from __future__ import annotations

from beam_views import Decode, Frame, Result, View, common, one_line, saved, size
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from pagefork.runtime import Beam, BeamSearchParams, Past

BAR = 30


class TreeView(View):
    """Beams as a tree of text: what they share stands once."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(BAR),
            TaskProgressColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("loading the model", total=None)
        self._live: Live | None = None
        self._prompt = ""
        self._decode: Decode | None = None

    def __enter__(self) -> None:
        self._progress.start()

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._live is not None:
            self._live.stop()

    def loading(self, stage: str, fraction: float) -> None:
        if stage == "fetch":
            self._progress.update(self._task, description="fetching the model (93 MB)", total=1.0, completed=fraction)
        else:
            self._progress.update(self._task, description="loading the model", total=None)

    def begin(self, model: str, prompt: str, params: BeamSearchParams, decode: Decode) -> None:
        self._progress.stop()
        self._prompt, self._decode = prompt, decode
        self._console.print(
            Text.assemble(
                ("pagefork", "bold magenta"),
                (f"  {model}, {params.width} beams, up to {params.max_tokens} tokens", "dim"),
            )
        )
        self._console.print()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def step(self, frame: Frame) -> None:
        assert self._live is not None
        self._live.update(Group(self._tree(frame), Text(), _status(frame)), refresh=True)

    def end(self, result: Result) -> None:
        self._console.print(Text(one_line(self._prompt), style="dim"))
        table = Table(box=box.SIMPLE_HEAD, header_style="dim", expand=True, padding=(0, 1))
        table.add_column("score", justify="right", no_wrap=True)
        table.add_column("tokens", justify="right", no_wrap=True, style="dim")
        table.add_column("text", ratio=1)
        for rank, beam in enumerate(result.beams):
            style = "bold green" if rank == 0 else ""
            shared = common(beam.text, result.beams[0].text) if rank else ""
            table.add_row(Text(f"{beam.score:.4f}", style=style), str(len(beam.tokens)), _text(beam, shared, style))
        self._console.print(table)
        self._console.print(Panel(_savings(result), box=box.ROUNDED, border_style="dim", expand=False))

    def _tree(self, frame: Frame) -> Tree:
        """Running, finished and just pruned beams; a branch carries what all below it share."""
        leaves = [*frame.running, *frame.finished, *frame.pruned]
        marks = {id(past): ("✗", "red dim strike") for past in frame.pruned}
        marks |= {id(past): ("✓", "green") for past in frame.finished}
        marks |= {id(past): ("●", "bold cyan" if past is frame.running[0] else "cyan") for past in frame.running}
        children: dict[int, list[Past]] = {}
        seen: set[int] = set()
        for leaf in leaves:
            node: Past | None = leaf
            while node is not None and id(node) not in seen:
                seen.add(id(node))
                children.setdefault(id(node.parent), []).append(node)
                node = node.parent
        tree = Tree(Text(one_line(self._prompt), style="dim"), guide_style="dim")
        for child in children.get(id(None), []):
            self._branch(tree, child, children, marks, 0)
        return tree

    def _branch(
        self, tree: Tree, past: Past, children: dict[int, list[Past]], marks: dict[int, tuple[str, str]], shown: int
    ) -> None:
        while len(children.get(id(past), [])) == 1 and id(past) not in marks:
            past = children[id(past)][0]
        text = self._words(past, shown) or "(end)"
        if id(past) in marks:
            mark, style = marks[id(past)]
            tree.add(Text.assemble((f"{mark} ", style.replace(" strike", "")), (text, style), _number(past)))
            return
        branch = tree.add(Text(text))
        for child in children[id(past)]:
            self._branch(branch, child, children, marks, past.length)

    def _words(self, past: Past, shown: int) -> str:
        """The text of its tokens after the first `shown`."""
        assert self._decode is not None
        tokens = past.tokens()
        whole, before = self._decode(tokens), self._decode(tokens[:shown]) if shown else ""
        return one_line(whole[len(before) :] if whole.startswith(before) else self._decode(tokens[shown:])).strip(" ")


def _text(beam: Beam, shared: str, style: str) -> Text:
    """A beam's text; what it has in common with the best one stands back."""
    own = beam.text[len(shared) :].rstrip()
    return Text.assemble(
        (one_line(shared.lstrip()), "dim"),
        (one_line(own if shared else own.lstrip()), style),
        ("" if beam.finished else " …", "dim"),
    )


def _number(past: Past) -> tuple[str, str]:
    return f"  {past.logprob:.2f}", "dim"


def _bar(value: int, whole: int, style: str, width: int = BAR) -> Text:
    full = round(width * value / whole) if whole else 0
    return Text.assemble(("━" * full, style), ("╌" * (width - full), "bright_black"))


def _status(frame: Frame) -> Text:
    return Text.assemble(
        (f"step {frame.step}/{frame.steps}", "bold"),
        f"   {frame.tokens_per_s:.0f} tokens/s   blocks ",
        _bar(frame.blocks, max(frame.private, frame.blocks), "magenta", BAR // 2),
        (f" {frame.blocks}", "bold magenta"),
        (f" of {frame.private} unshared", "dim"),
        (f"   {size(frame.copied_bytes)} copied", "dim"),
    )


def _savings(result: Result) -> Table:
    most = max(result.peak, result.unshared)
    table = Table.grid(padding=(0, 2))
    table.add_row("blocks at peak", _bar(result.peak, most, "magenta"), f"[bold magenta]{result.peak}[/]")
    table.add_row(
        "a private cache per beam",
        _bar(result.unshared, most, "yellow"),
        f"{result.unshared}  [dim]{saved(result)} % saved[/]",
    )
    copied = max(result.copied_bytes, result.unshared_bytes)
    table.add_row(
        "KV copied", _bar(result.copied_bytes, copied, "magenta"), f"[bold magenta]{size(result.copied_bytes)}[/]"
    )
    table.add_row("a whole cache per fork", _bar(result.unshared_bytes, copied, "yellow"), size(result.unshared_bytes))
    table.add_row(
        "speed", f"{result.tokens_per_s:.1f} tokens/s", f"[dim]{result.tokens} tokens in {result.seconds:.2f} s[/]"
    )
    return table
