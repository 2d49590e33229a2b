// What Python calls: packing of weights, and tapes of operations.
#include "ops.h"
#include "sampling.h"

using namespace holdfast;

namespace {

template <class T, class... Ops>
void run_one(const Op* op, Context& context) {
    int32_t code = 0;
    ((code++ == op->code ? static_cast<const Ops*>(op)->template run<T>(context) : void()), ...);
}

template <class... Ops>
struct Codes {
    template <class T>
    static void run(const Op* op, Context& context) {
        run_one<T, Ops...>(op, context);
    }
    static constexpr int64_t SIZES[] = {int64_t(sizeof(Ops))...};
};

using AllOps = Codes<
    PrepareOp, PagesOp, EmbedOp, GatherOp, AddNormOp, SquaresOp, ScaleNormOp, LinearOp, ByHeadOp, RotateOp,
    RotateAndWriteOp, WriteLatentsOp, AttendOp, GatedOp, RouteOp, ExpertsOp, AddGatedOp>;

}  // namespace

extern "C" {

// The size of each operation's structure, in bytes, by its number; 0 past the last.
int64_t holdfast_op_size(int64_t code) {
    return code < int64_t(sizeof(AllOps::SIZES) / sizeof(int64_t)) ? AllOps::SIZES[code] : 0;
}

Context* holdfast_open(int64_t num_threads) { return new Context{new Pool(int(num_threads)), {}, {}}; }

void holdfast_close(Context* context) {
    delete context->pool;
    delete context;
}

int64_t holdfast_panel_bytes(int64_t rows, int64_t depth, int32_t kind) {
    Weight weight{nullptr, nullptr, rows, depth, kind};
    return weight.panels() * weight.panel_bytes();
}

void holdfast_pack(const void* weight, int64_t rows, int64_t depth, int32_t kind, void* panels) {
    if (kind == FLOAT32)
        pack_panels(static_cast<const uint32_t*>(weight), rows, depth, static_cast<uint32_t*>(panels));
    else if (kind == BFLOAT16)
        pack_panels(static_cast<const uint16_t*>(weight), rows, depth, static_cast<uint16_t*>(panels));
    else
        pack_panels(static_cast<const uint8_t*>(weight), rows, depth, static_cast<uint8_t*>(panels));
}

void holdfast_choose(
    Context* context, const float* temperatures, const uint32_t* keys, int64_t num_rows, int64_t vocab_size,
    const float* logits, int64_t* tokens) {
    choose(*context->pool, temperatures, keys, num_rows, vocab_size, logits, tokens);
}

void holdfast_mask(
    Context* context, const int32_t* rows, int64_t num_rows, const uint32_t* words, int64_t num_words,
    int64_t vocab_size, float* logits) {
    mask(*context->pool, rows, num_rows, words, num_words, vocab_size, logits);
}

// Runs operations on activations of `kind`, FLOAT32 or BFLOAT16.
void holdfast_run(
    Context* context, int32_t kind, const Op* const* ops, int64_t num_ops, const int32_t* tokens, int64_t num_tokens,
    const int32_t* rows, const int32_t* starts, const int32_t* counts, int64_t num_sequences, const int32_t* logit_rows,
    int64_t num_samples) {
    std::vector<int32_t> positions, firsts;
    for (int64_t i = 0; i < num_sequences; i++) {
        firsts.push_back(int32_t(positions.size()));
        for (int32_t j = 0; j < counts[i]; j++) positions.push_back(starts[i] + j);
    }
    context->batch = {num_tokens, num_samples, num_sequences,    tokens,       rows, starts,
                      counts,     logit_rows,  positions.data(), firsts.data()};
    for (int64_t i = 0; i < num_ops; i++) {
        if (kind == FLOAT32) AllOps::run<float>(ops[i], *context);
        else AllOps::run<BFloat16>(ops[i], *context);
    }
}

}  // extern "C"
