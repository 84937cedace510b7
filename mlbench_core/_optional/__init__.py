"""Import optional packages, or name the extra that installs one; import subpackages on use."""
