"""Verdicts, tables of sites and verifications as terminal text, JSON and HTML.

Everything that is printed may come from a stranger's trace: names and values pass through
`report.text` (terminal) or are escaped (HTML), so that no markup or control sequence acts.
"""
