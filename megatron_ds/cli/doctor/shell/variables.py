"""The variables of a shell, and the arguments of its script or function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Variables:
    """Values by name; each is a list, of which a plain variable has one element.

    An element with a key has the name `NAME[key]`, and `NAME[]` is the list of the keys.

    Args:
        environment: Values of variables of the environment.
        arguments: Name and arguments of the script.

    Attributes:
        values: The values.
        arguments: Name and arguments of the script, or of the function that is executed.
    """

    def __init__(self, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
        self.values = {name: [value] for name, value in environment.items()}
        self.arguments = tuple(arguments)
        self._place = 1, 0
        """The argument, and the letter in it, that `getopts` reads next."""

    def get(self, name: str) -> list[str] | None:
        """The elements of a variable, None if it is not set."""
        if name in ("@", "*"):
            return [*self.arguments[1:]]
        if name == "#":
            return [str(len(self.arguments) - 1)]
        if name in ("?", "$", "!", "-"):
            return ["0"]
        if name.isdigit():
            return [*self.arguments[int(name) : int(name) + 1]] if len(name) < 6 else []
        return self.values.get(name)

    def set_element(self, name: str, key: str, value: str) -> None:
        """Sets an element of a list with keys."""
        keys = self.values.setdefault(f"{name}[]", [])
        if key not in keys:
            self.values[f"{name}[]"] = [*keys, key]
        self.values[f"{name}[{key}]"] = [value]
        self.values[name] = ["".join(self.values[f"{name}[{k}]"]) for k in self.values[f"{name}[]"]]

    def state(self) -> tuple[object, ...]:
        """Snapshot of all state that determines what the same commands do when they run again."""
        return dict(self.values), self.arguments, self._place

    def shift(self, count: str) -> bool:
        """Removes the first arguments; returns whether there were enough."""
        places = int(count) if count.isascii() and count.isdigit() and len(count) < 6 else -1
        if not 0 <= places < len(self.arguments):
            return False
        self.arguments = (self.arguments[0], *self.arguments[1 + places :])
        return True

    def next_option(self, letters: str, name: str, arguments: Sequence[str]) -> bool:
        """Sets a variable and OPTARG as `getopts` does; returns whether there was an option.

        Args:
            letters: The options; a colon follows each that has an argument.
            name: The variable.
            arguments: Arguments to read.
        """
        index, letter = self._place
        word = "".join(arguments[index - 1 : index])
        if letter == 0 and (not word.startswith("-") or word in ("-", "--")):
            self.values["OPTIND"] = [str(index + (word == "--"))]
            self.values[name] = ["?"]
            return False
        option = word[letter + 1]
        following = word[letter + 2 :]
        position = letters.lstrip(":").find(option) if option != ":" else -1
        takes_value = letters.lstrip(":")[position + 1 : position + 2] == ":"
        self.values[name] = ["?" if position < 0 else option]
        self._place = (index, letter + 1) if following else (index + 1, 0)
        if position >= 0 and takes_value:
            value = following or "".join(arguments[index : index + 1])
            self.values["OPTARG"] = [value]
            self._place = index + 1 + (not following), 0
        self.values["OPTIND"] = [str(self._place[0])]
        return True
