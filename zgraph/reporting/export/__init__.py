"""`report.json`, and the files for other tools that are made from it."""
