"""What towers that merge square patches into tokens have in common."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PatchTower:
    """A tower that reads the patches of pictures in their own proportions."""

    patch_size: int
    """Pixels of a patch in height, and in width."""
    merge_size: int
    """Patches that are merged in height, and in width, into one token."""

    @property
    def token_size(self) -> int:
        """Pixels of a token in height, and in width."""
        return self.patch_size * self.merge_size

    def num_tokens(self, num_patches: int) -> int:
        """Returns how many tokens stand for so many patches."""
        return num_patches // self.merge_size**2
