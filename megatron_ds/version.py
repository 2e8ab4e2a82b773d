"""The version of the package; CHANGELOG.md says what a version promises."""

VERSION = "0.2.0"
