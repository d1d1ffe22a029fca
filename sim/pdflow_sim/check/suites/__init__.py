"""The suites of `pdflow check`, one file each: a function of the options that returns a SuiteResult."""
