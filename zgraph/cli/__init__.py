"""The command `zgraph`: one file for each subcommand; `commands` puts them together."""
