"""From complete files to a commit: manifests, compare-and-set, checks after the commit, removal of orphans."""
