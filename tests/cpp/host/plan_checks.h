// Checks of what plans decide on devices that nobody here has.
#pragma once

/// FAILED where a tile is taken that a simulation of thread blocks finds a fifth slower than another (choices.cu).
void check_choices();

/// FAILED where the tiles that a device finds, or their splits, have no room in a list (list_room.cu).
void check_room_of_lists();

/// FAILED where the keys of many requests are split without a list (list_room.cu).
void check_splits_of_many_requests();

/// FAILED where kAuto gives 8-bit keys in pages to another backend than the Python package does (backends.cu).
void check_backends_of_8_bit_pages();

/// Plans problems of any sizes, possible and impossible ones: under a sanitizer, what planning must not do ends the
/// program (random_plans.cu). FAILED where workspace_size() promises too little.
void check_random_plans();

/// FAILED where a mask's bounds are not what 64 bits give (mask_bounds.cu).
void check_mask_bounds();

/// FAILED where the splits of latent attention depend on the batch although they must not (latent.cu).
void check_latent_attention();
