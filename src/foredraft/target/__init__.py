"""The target model: found, loaded, run, with its cache."""
