"""Make and delete clusters with the programs that manage them."""
