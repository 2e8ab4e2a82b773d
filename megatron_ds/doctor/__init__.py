"""Program around `cli/doctor`: translates training commands of other frameworks."""
