"""The documentation: the site is built, the commands of its pages are run."""
