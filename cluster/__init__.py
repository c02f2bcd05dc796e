"""Ray: actors, scheduler, driver, ledger, command line."""
