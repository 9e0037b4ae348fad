"""`report.json`, and the files of other tools that are made from it."""
