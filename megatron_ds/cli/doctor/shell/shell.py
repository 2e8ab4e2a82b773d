"""Reads shell scripts without executing them: the programs that they start, and their arguments.

Owns the part of the shell's language that launch scripts are written in: variables, arrays,
quotes, defaults, arithmetic, conditions, loops, functions, `eval`, `bash -c`, other scripts, jobs
of Slurm, and text that goes to files. What else a script contains is named with its line, and what
depends on it stays as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from megatron_ds.cli.doctor.shell import slurm
from megatron_ds.cli.doctor.shell.compounds import CompoundCommands
from megatron_ds.cli.doctor.shell.conditions import INVERSE, Condition, Conditions
from megatron_ds.cli.doctor.shell.launches import Result
from megatron_ds.cli.doctor.shell.marks import (
    LOST,
    UNKNOWN,
    moved,
    unmarked,
    unquoted,
)
from megatron_ds.cli.doctor.shell.reading import Budget, Reading
from megatron_ds.cli.doctor.shell.simple_commands import ASSIGNMENT, End, SimpleCommands
from megatron_ds.cli.doctor.shell.tokens import WORDS, Tokens
from megatron_ds.cli.doctor.shell.variables import Variables
from megatron_ds.cli.doctor.shell.words import Words

REDIRECTION = re.compile(r"\d*[<>](?!\()|&>")
ELEMENT = re.compile(r"\[([^\]]+)\]=")
"""The key of an element in a list."""
FUNCTION = re.compile(r"(?:function\s+([\w-]+)(?:\s*\(\s*\))?|([\w-]+)\s*\(\s*\))\s*")
END = re.compile(r"(?:\s|;|\)|#[^\n]*|(?:fi|esac|done|exit \S+)\b|\})*+")
"""Matches the remainder of a script after its last command: separators, comments and closing
keywords."""
PIPES = ("|", "|&")
CHAINS = ("&&", "||")
JOINTS = ("\n", ";", ";;", ";&", ";;&", "&", *CHAINS, *PIPES, ")")
SCRIPTS = WORDS["scripts"]
DEPTH = 20
"""Scripts and functions within each other that are read."""
STEPS_OF_SCRIPT = 10
"""Steps that reading another script, or the output of a command, takes."""


class Shell:
    """Reads a script in the order in which a shell would execute it.

    Args:
        path: Name of the script.
        variables: Values of variables of the environment.
        arguments: Arguments of the script.
    """

    def __init__(self, path: str, variables: dict[str, str], arguments: Sequence[str] = ()) -> None:
        self.reading = Reading()
        self.variables = Variables(variables, [path, *arguments])
        self.job_options: list[str] = []
        self._given = frozenset(variables)
        self.tokens = Tokens("")
        self.path = path
        self._depth = 0
        self.words = Words(self)
        self._budget = Budget()
        self._functions: dict[str, tuple[Tokens, str]] = {}
        self._conditions = Conditions()
        self._commands = SimpleCommands(self, self._conditions)
        self._compounds = CompoundCommands(self, self._conditions)

    @property
    def line(self) -> int:
        """The line that is read."""
        return self.tokens.line + self.words.lines

    def read(self, text: str, line: int = 1, *, is_same_shell: bool = False) -> Result:
        """Read a script, or a command that is an argument of a shell.

        Args:
            text: The script.
            line: Number of its first line.
            is_same_shell: Whether its `exit` also ends the script around it.

        Raises:
            UserError: If there is too much to read.
        """
        self.spend(characters=len(text), steps=STEPS_OF_SCRIPT)
        self._budget.check_nesting(f"{self.path}:{line}", text)
        return self._inside(Tokens(text, line), lambda: self.run(()), is_same_shell)

    def read_job(self, text: str, line: int = 1, options: Sequence[str] = ()) -> Result:
        """Read a script that may have options of Slurm.

        Args:
            text: The script.
            line: Number of its first line.
            options: Options of sbatch, which override the script's own.
        """
        outside = self.job_options
        options_of_script, unread = slurm.job_options(text)
        for row, reason in unread:
            self.reading.unread.append(f"{self.path}:{line + row - 1}: {reason}")
        self.job_options = [*options_of_script, *options]
        for name, value in slurm.job_variables(self.job_options).items():
            if name not in self._given:
                self.variables.values[name] = [value]
        result = self.read(text, line)
        if self._depth:  # the script around it is no part of this job
            self.job_options = outside
        return result

    def output_of(self, text: str) -> str:
        """The output of commands."""
        return self.read(text, self.line)[1]

    def spend(self, characters: int = 0, steps: int = 0) -> None:
        """Takes from what may be read."""
        self._budget.spend(f"{self.path}:{self.line}", characters, steps)

    def unread(self, text: str, taken: str = "", line: int | None = None) -> str:
        """Notes a construct, and returns a placeholder for its value."""
        written = f"{self.path}:{line or self.line}: {unmarked(text).strip()}"
        self.reading.unread.append(f"{written}: {taken}" if taken else written)
        return moved(text, 0, UNKNOWN)

    def note_unset(self, name: str) -> None:
        """Notes a variable that nothing sets."""
        self.reading.unset.setdefault(name, f"{self.path}:{self.line}")

    def _inside(self, tokens: Tokens, action: Callable[[], Result], is_same_shell: bool) -> Result:
        """Reads something else before the reading of the script continues."""
        if self._depth >= DEPTH:
            self.unread("script", f"more than {DEPTH} scripts within each other")
            return None, LOST
        outside = self.tokens, self.words.lines, self.path, self.variables.arguments
        conditions = len(self._conditions.stack)
        loops = self._conditions.loops
        self._conditions.loops = loops if is_same_shell else 0
        self.tokens = tokens
        self.words.lines = 0
        self._depth += 1
        try:
            return action()
        except End as end:
            if is_same_shell and not end.is_return:
                raise
            return end.status, LOST
        except RecursionError:
            self.unread("script", "nested too deeply")
            return None, LOST
        finally:
            self._depth -= 1
            del self._conditions.stack[conditions:]
            self._conditions.loops = loops
            self.tokens, self.words.lines, self.path, self.variables.arguments = outside

    def take(self) -> str:
        self.spend(steps=1)
        return self.tokens.take()

    def run(self, ends: Collection[str], live: bool = True) -> Result:
        """Runs the commands up to one of these words; skips them if they are not `live`."""
        result: Result = True, ""
        joint = ""
        is_skipped = False
        before = ""
        while (word := self.tokens.peek()) and word not in ends:
            if word in JOINTS or word in ("do", "then"):
                self.take()
                if word != "\n" or joint not in (*CHAINS, *PIPES):
                    joint = word
                continue
            is_piped = joint in PIPES
            is_chained = joint in CHAINS
            condition = self._conditions.last
            if not is_piped:  # what is not executed is taken to succeed
                is_skipped = is_chained and (joint == "||") is (result[0] is not False)
                before = result[1]
                self._conditions.last = condition if is_chained or not live else Condition()
            acts = live and not is_skipped
            self._conditions.stack += [condition] * is_chained
            status, output = self._command(acts, result[1][len(before) :] if is_piped else "")
            if is_chained:
                self._conditions.stack.pop()
                self._conditions.join(condition)
            if acts:
                result = status, before + output
            live = live and (is_chained or not self._conditions.is_left)
            self._conditions.is_left = False
            joint = ""
        return result

    def _command(self, live: bool, text: str) -> Result:
        """Runs a command with a text as its input."""
        first = self.tokens.peek()
        line = self.tokens.line
        start = self.tokens.position
        if first == "!":
            self.take()
            status, output = self._command(live, text)
            return INVERSE.get(status), output
        result = self._compound(first, live)
        fields = list[str]()
        targets = list[str]()
        last = ""
        text_line = line
        has_input = False
        while (word := self.tokens.peek()) and (
            word not in JOINTS or (first == "[[" and last != "]]")
        ):
            last = self.take()
            if first == "[[":
                fields += [self.words.text(word)] * live
            elif REDIRECTION.match(word):
                target = self.take()
                has_input = has_input or word[-1] in "<-"
                if word.endswith(("<<", "<<-")) and not word.endswith("<<<"):
                    text, text_line = self._document(target, word[-1] == "-", live)
                elif word[-1] == "<":
                    text = self.words.text(target) + "\n" if word[-3:] == "<<<" and live else LOST
                elif live and ">" in word and "&" not in word and word[0] != "2":
                    targets.append(self.words.text(target))
            elif ASSIGNMENT.match(word) and (not fields or fields[0] in WORDS["declarations"]):
                self._assign(word, live)
            elif live:
                fields += self.words.fields(word)
        if not live:
            return None, LOST
        ended = self.tokens.line
        self.tokens.line = line
        if fields[:1] == ["read"] and not has_input:
            text = ""  # the shell behind a pipe is another one
        status, output = result or self._commands.run(fields, text, text_line)
        for path in targets:
            self._write(path, output, start)
        self.tokens.line = ended
        return status, "" if targets else output

    def _write(self, path: str, output: str, start: int) -> None:
        self.reading.files[path] = None if LOST in output else output
        if LOST in output and path.endswith(".json"):
            written = self.tokens.rest_of_line(start)
            self.unread(written, f"the content of {path} is not known")

    def _compound(self, first: str, live: bool) -> Result | None:
        """Runs a compound command, or defines a function; None for other commands."""
        result = self._compounds.run(first, live)
        function = FUNCTION.match(self.tokens.text, self.tokens.position)
        if result is not None or function is None:
            return result
        self.tokens.go(function.end())
        if live:
            name = function[1] or function[2]
            self._functions[name] = self.tokens.at(function.end()), self.path
        self._command(False, "")
        return True, ""

    def _document(self, mark: str, is_indented: bool, live: bool) -> tuple[str, int]:
        """The text of a here-document, and its first line."""
        body, line = self.tokens.document(mark, r"\t*" if is_indented else "")
        self.spend(characters=len(body))
        if live and not re.search(r"[\"'\\]", mark):
            expanded = self.words.expand(body.replace('\\"', '\\\\"'), quoted=True)
            return unquoted(expanded), line
        return body, line

    def _assign(self, word: str, live: bool) -> None:
        """Sets a variable, or a list whose elements follow its name."""
        name, adds, written = ASSIGNMENT.split(word, maxsplit=1)[1:]
        if "[" in name:
            self._assign_element(name, bool(adds), written, live)
            return
        old = self.variables.values.get(name, []) if adds else []
        if written or not self.tokens.text.startswith("(", self.tokens.position):
            value = ["".join(old[:1]) + self.words.text(written), *old[1:]] if live else []
            self.spend(characters=sum(map(len, old)))
        else:
            self.take()
            value = list(old)
            while (word := self.take()) not in (")", ""):
                key = ELEMENT.match(word)
                if key is not None and live:
                    text = self.words.text(word[key.end() :])
                    self.variables.set_element(name, self.words.text(key[1]), text)
                    value = self.variables.values[name]
                elif live:
                    value += self.words.fields(word)
        if live:
            self.variables.values[name] = value

    def _assign_element(self, written_name: str, adds: bool, written: str, live: bool) -> None:
        """Sets an element, `NAME[key]=value`; that of a plain list by its position."""
        name, key = written_name.removesuffix("]").split("[", 1)
        if not live:
            return
        key = self.words.text(key)
        text = self.words.text(written)
        values = self.variables.values
        if key.isdigit() and f"{name}[]" not in values and int(key) <= len(values.get(name, [])):
            elements = [*values.get(name, []), *[""] * (int(key) == len(values.get(name, [])))]
            elements[int(key)] = elements[int(key)] * adds + text
            values[name] = elements
        else:
            before = "".join(values.get(f"{name}[{key}]", [])) if adds else ""
            self.variables.set_element(name, key, before + text)

    def is_at_end(self) -> bool:
        """Whether nothing of the script is left."""
        return END.fullmatch(self.tokens.text, self.tokens.position) is not None

    def call(self, fields: list[str], text: str) -> Result | None:
        """Runs a function of the script; None if the script defines no function of this name."""
        if fields[0] not in self._functions:
            return None
        tokens, path = self._functions[fields[0]]

        def run() -> Result:
            self.path = path
            self.variables.arguments = (self.variables.arguments[0], *fields[1:])
            return self._command(True, text)

        return self._inside(tokens.at(tokens.position), run, is_same_shell=True)
