// The tile table of the fa3 backend, read by host (launch) and device (kernel).
#pragma once

namespace cutlass_kernels::fa3 {

// Rows of a consumer warpgroup: the M of wgmma.
constexpr int kWarpgroupRows = 64;

template <int HeadDimQk, int HeadDimVo, int Consumers, int BlockN, int Stages, int QBuffers,
          int OPanels, bool PingPong, int BlocksPerSm>
struct Tile {
  static constexpr int kHeadDimQk = HeadDimQk;
  static constexpr int kHeadDimVo = HeadDimVo;
  static constexpr int kConsumers = Consumers;  // warpgroups, of 64 query rows each
  static constexpr int kBlockM = kWarpgroupRows * Consumers;
  static constexpr int kBlockN = BlockN;  // keys per step
  static constexpr int kStages = Stages;  // of K and of V in shared memory
  static constexpr int kQBuffers =
      QBuffers;  // of 64 query rows each, dealt to the warpgroups in turn
  // O is staged in shared memory of its own, this many panels of 64 columns per warpgroup at a time.
  static constexpr int kOPanels = OPanels;
  static constexpr bool kPingPong = PingPong;  // warpgroups take turns in issuing their products
  static constexpr int kBlocksPerSm = BlocksPerSm;
  static constexpr int kThreads = 128 * (1 + Consumers);

  // Registers per thread after setmaxnreg: what is there (65536 per SM), split between one warpgroup of producers and
  // the consumers.
  static constexpr int kProducerRegisters = Consumers == 2 ? 40 : (Consumers == 3 ? 32 : 24);
  static constexpr int kConsumerRegisters = Consumers == 2 ? 232 : (Consumers == 3 ? 160 : 232);
};

}  // namespace cutlass_kernels::fa3
